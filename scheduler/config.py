"""Settings of the scheduler: the planner's, and how a step is collected, moved and handed out."""

from typing import Literal, get_args

import msgspec

from ..core.fields import TENSOR_DTYPES
from .plan.config import PlanConfig, check_int, check_literal, check_real

Scope = Literal["group", "rank", "microbatch"]
OnExhausted = Literal["drain", "stop"]
LossAverage = Literal["token", "sample"]
TransportName = Literal["auto", "host", "device"]

PIXEL_DTYPES: tuple[str, ...] = tuple(name for name in TENSOR_DTYPES if "float" in name)


class SchedulerConfig(PlanConfig, frozen=True, kw_only=True):
    """Everything that `PackingScheduler` is told besides source, adapter and groups: the settings of `PlanConfig`, and these.

    Attributes:
        samples_per_step: samples that each rank brings to a step.
        tokens_per_step: real tokens of the whole group in a step, instead of `samples_per_step`: the longest prefix in
            (round, rank) order that does not exceed it, round i being the i-th waiting sample of every rank.
        scope: plan over the data-parallel group, over each rank's own samples, or take every list that the source yields as
            one pack ("microbatch": `num_microbatches` lists a step).
        on_exhausted: when a source ends, spread what the others still have ("drain"), or end with the last full step.
        defer: most steps that a sample heavier than the mean rank load may wait for its like; None never delays one.
        loss_average: average the loss over target tokens (by weight), or over samples first.
        pixel_dtype: floating dtype to which pixels are cast on their own rank, before they move; None keeps them.
        prefetch: steps prepared ahead while the current one trains; 0 prepares each when it is asked for.
        transport: how rows and blocks travel; see `scheduler.transports`.
        shared_memory: hand samples to ranks of the same node through memory that both see, where the system allows it, instead
            of the network; nothing is written to a file system.
        max_peers: ranks that one rank exchanges blocks with over the device transport.
        timeout: seconds without progress of the group after which a rank gives up and names the missing peer.

    Raises:
        ValueError: a setting of the wrong type or range, or settings that exclude one another.

    Example:
        >>> SchedulerConfig(max_tokens=8192, samples_per_step=16).scope
        'group'
    """

    samples_per_step: int | None = None
    tokens_per_step: int | None = None
    scope: Scope = "group"
    on_exhausted: OnExhausted = "drain"
    defer: int | None = None
    loss_average: LossAverage = "token"
    pixel_dtype: str | None = None
    prefetch: int = 1
    transport: TransportName = "auto"
    shared_memory: bool = True
    max_peers: int = 8
    timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples_per_step", "tokens_per_step", "defer"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("prefetch", self.prefetch, 0)
        check_int("max_peers", self.max_peers, 1)
        check_real("timeout", self.timeout, 0.1, 1e7)
        for name, kind in (
            ("scope", Scope),
            ("on_exhausted", OnExhausted),
            ("loss_average", LossAverage),
            ("transport", TransportName),
        ):
            check_literal(name, getattr(self, name), get_args(kind))
        if self.pixel_dtype is not None:
            check_literal("pixel_dtype", self.pixel_dtype, PIXEL_DTYPES)
        self._check_step_size()

    def _check_step_size(self) -> None:
        given = [name for name in ("samples_per_step", "tokens_per_step") if getattr(self, name) is not None]
        if self.scope == "microbatch":
            if given:
                raise ValueError(f"scope='microbatch' takes its steps from num_microbatches: leave out {given[0]}")
            if self.num_microbatches is None:
                raise ValueError("scope='microbatch' needs num_microbatches: the lists that make one step")
        elif len(given) != 1:
            raise ValueError(f"give exactly one of samples_per_step and tokens_per_step, got {given or 'neither'}")
        if self.defer is not None and (self.scope != "group" or self.samples_per_step is None):
            raise ValueError(f"defer needs scope='group' and samples_per_step, got scope={self.scope!r}")

    def resolved(self, **defaults: object) -> "SchedulerConfig":
        """Return these settings with the adapter's values for what the user left open.

        Args:
            **defaults: values for `trained_modalities`, `shared_towers`, `dummy_tokens` and `dummy_cost`; the user's own
                entries win.
        """
        changes: dict[str, object] = {}
        for name, value in defaults.items():
            own = getattr(self, name)
            if own is None:
                changes[name] = value
            elif isinstance(own, dict):
                assert isinstance(value, dict)
                changes[name] = {**value, **own}
        return msgspec.structs.replace(self, **changes)
