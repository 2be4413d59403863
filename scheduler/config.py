"""Settings of the scheduler: the planner's, and how a step is collected, moved and handed out."""

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import msgspec

from ..collate.samples.group import Groups
from ..core.fields import TENSOR_DTYPES
from .plan.settings import PlanConfig, check_int, check_literal, check_real

Scope = Literal["group", "rank", "microbatch"]
OnExhausted = Literal["drain", "stop"]
LossAverage = Literal["token", "sample"]
TransportName = Literal["auto", "host", "device", "network"]

#: What follows from one byte of a sample's record, and from two: see `stages.describe.record_dtype`.
MAX_LOOKAHEAD, MAX_LISTS = 128, 65535
PIXEL_DTYPES: tuple[str, ...] = tuple(name for name in TENSOR_DTYPES if "float" in name)


_DEFER = (
    "defer is gone: lookahead=8 keeps 8 steps in view, in which heavy samples run together, and with company that costs as much"
)


class _RefusesDefer(msgspec.StructMeta):
    """`SchedulerConfig(defer=...)` says what replaced it, in place of a bare TypeError."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        if "defer" in settings:
            raise ValueError(_DEFER)
        return super().__call__(*args, **settings)


class SchedulerConfig(PlanConfig, frozen=True, kw_only=True, metaclass=_RefusesDefer):
    """Settings of `PackingScheduler`, besides source, adapter and groups. Most users set the first six at most.

    Attributes:
        max_tokens: most padded tokens per GPU and pack; a pack's capacity is `max_tokens * cp_size`.
        samples_per_step: samples that each rank brings to a step.
        sync: where ranks wait: once a step (DDP, ZeRO-1) or in every micro-batch (FSDP, expert parallel).
        oversize: what happens to a sample above the capacity: an error, or it is dropped, or truncated. "drop" also drops
            what a fixed `num_microbatches` cannot hold; the others raise an error there.
        on_exhausted: when a source ends, spread what the others still have ("drain"), or end with the last full step.
        prefetch: steps prepared ahead while the current one trains; 0 prepares each when it is asked for.
        tokens_per_step: real tokens of the whole group in a step, instead of `samples_per_step`: the longest prefix in
            (round, rank) order that does not exceed it, round i being the i-th waiting sample of every rank.
        num_microbatches: packs per rank and step; None lets the planner choose.
        microbatch_multiple: number of micro-batches is a multiple of this (virtual pipelines).
        microbatch_cost: fixed cost of one micro-batch, in the units of the sample costs.
        pipeline_stages: pipeline-parallel size P; adds (P - 1) times a rank's largest micro-batch at `sync="step"`. With a
            pipeline, a rank's small packs run first and last; without, its packs run heaviest first.
        max_segments: most segments per pack, a tail included; None for no limit.
        align: multiple to which every segment is padded; None means 2 * cp_size if cp_size > 1, else 1.
        pack_align: multiple to which every pack is padded, itself a multiple of `align`; None means `align`.
        tolerance: imbalance, relative to the lower bound, below which samples stay at home.
        movement: keep samples at home where balance allows ("minimal"), or ignore homes ("free").
        scope: plan over the data-parallel group, over each rank's own samples, or take every list that the source yields as
            one pack ("microbatch": `num_microbatches` lists a step).
        lookahead: steps whose samples are in view when a step is planned. With W of them, a sample that would make all ranks
            wait is trained with others as heavy, at most W - 1 steps before or after its turn, and takes others' place in the
            source order; 1 keeps that order. See docs/planner.md.
        step_tokens_tolerance: most relative difference of a step's real tokens to the mean of the steps in view. A step with a
            sample that costs more than a rank's share of it holds more; `stats.tokens_over_mean` says so.
        step_samples_tolerance: the same, of its number of samples.
        loss_average: average the loss over target tokens (by weight), or over samples first.
        groups: what becomes of samples that follow one another with the same `group_id` (answers to one prompt, a preference
            pair): as any samples ("split"); in one pack ("together"); or also with what they have in common computed once:
            tokens that no member learns ("prompt"), or all ("prefix": weights add up). The last two take a group of three or
            more apart that is too large or too heavy for one pack, each part with its copy. A group counts as one sample in
            `samples_per_step`.
        pixel_dtype: floating dtype to which pixels are cast on their own rank, before they move; None keeps them.
        transport: how metadata and samples travel: over host memory ("host": gloo, and memory that ranks of a node share), over
            the accelerator's network ("device": NCCL), the best of both ("auto"), or as "auto" but without memory that ranks of
            a node share ("network"). See `scheduler.comm.transports`.
        static_shapes: give every pack the same shapes, for `torch.compile` and captured graphs: rows of the whole capacity,
            `max_segments + 1` boundaries, the row's length as `max_seqlen`. Needs `max_segments`. Media keep their sizes.
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
    lookahead: int = 1
    step_tokens_tolerance: float = 0.1
    step_samples_tolerance: float = 0.5
    loss_average: LossAverage = "token"
    pixel_dtype: str | None = None
    groups: Groups = "split"
    prefetch: int = 1
    transport: TransportName = "auto"
    static_shapes: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples_per_step", "tokens_per_step"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("prefetch", self.prefetch, 0)
        check_int("lookahead", self.lookahead, 1)
        check_real("step_tokens_tolerance", self.step_tokens_tolerance, 0.0, 1.0)
        check_real("step_samples_tolerance", self.step_samples_tolerance, 0.0, 1.0)
        check_real("timeout", self.timeout, 0.1, 1e7)
        for name, kind in (
            ("scope", Scope),
            ("on_exhausted", OnExhausted),
            ("loss_average", LossAverage),
            ("transport", TransportName),
            ("groups", Groups),
        ):
            check_literal(name, getattr(self, name), get_args(kind))
        if self.pixel_dtype is not None:
            check_literal("pixel_dtype", self.pixel_dtype, PIXEL_DTYPES)
        if not isinstance(self.static_shapes, bool):
            raise ValueError(f"static_shapes must be True or False, got {self.static_shapes!r}")
        if self.static_shapes and self.max_segments is None:
            raise ValueError(
                "static_shapes needs max_segments, the number of segments that every pack's boundaries have room for"
            )
        self._check_groups()
        self._check_step_size()
        for name, value, most in (
            ("lookahead", self.lookahead, MAX_LOOKAHEAD),
            ("num_microbatches", self.num_microbatches if self.scope == "microbatch" else None, MAX_LISTS),
        ):
            if value is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Build the settings from a plain mapping, as `PlanConfig.from_dict` does."""
        if "defer" in settings:
            raise ValueError(_DEFER)
        return super().from_dict(settings)

    def resolved(self, cp_size: int) -> "SchedulerConfig":
        """Return the settings with what `static_shapes` means: rows padded to the whole capacity."""
        if not self.static_shapes:
            return self
        multiple = self.pack_align or self.segment_align(cp_size)
        return msgspec.structs.replace(self, pack_align=self.max_tokens * cp_size // multiple * multiple or multiple)

    def _check_groups(self) -> None:
        if self.groups == "split":
            return
        refused = {
            "oversize='truncate', which would cut the last answers": self.oversize == "truncate",
            "scope='microbatch', where lists are packs already": self.scope == "microbatch",
            "loss_average='sample', where targets of a prefix have several weights": self.groups == "prefix"
            and self.loss_average == "sample",
            "static_shapes, which counts segments": self.static_shapes or self.max_segments is not None,
        }
        for what, is_set in refused.items():
            if is_set:
                raise ValueError(f"groups={self.groups!r} excludes {what}")

    def _check_step_size(self) -> None:
        given = [name for name in ("samples_per_step", "tokens_per_step") if getattr(self, name) is not None]
        if self.scope == "microbatch":
            if given:
                raise ValueError(f"scope='microbatch' takes its steps from num_microbatches: leave out {given[0]}")
            if self.num_microbatches is None:
                raise ValueError("scope='microbatch' needs num_microbatches: the lists that make one step")
        elif len(given) != 1:
            raise ValueError(f"give exactly one of samples_per_step and tokens_per_step, got {given or 'neither'}")
        if self.lookahead > 1:
            self._check_lookahead()

    def _check_lookahead(self) -> None:
        needs = {
            "scope='group'": (self.scope == "group", f"scope={self.scope!r}"),
            "samples_per_step": (self.samples_per_step is not None, f"tokens_per_step={self.tokens_per_step}"),
            "num_microbatches=None": (self.num_microbatches is None, f"num_microbatches={self.num_microbatches}"),
        }
        for need, (met, given) in needs.items():
            if not met:
                raise ValueError(f"lookahead={self.lookahead} needs {need}, got {given}")
