"""What is recorded once, until it changes: all that planning a recorded step again needs."""

from typing import Any

import msgspec

from ...._version import __version__  # pyright: ignore[reportMissingImports]
from ...config import SchedulerConfig
from ...plan import CODE_VERSION, MediaTowers
from ...stats import StepStats
from ...step import PackedStep


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The settings under which steps were planned; written again when they change.

    Attributes:
        version: of evenpack.
        code_version: of the planner: another one may plan the same table differently.
        planner: name of the function that planned.
        settings: the scheduler's settings, as plain data.
        towers: the adapter's media towers, which the plan knew.
        num_ranks: R.
        cp_size: context-parallel size.
        phases: names of the cost's phases.
        node_of_rank: `[R]`, node of each rank.
        peers: ranks that each rank may send samples to; None for any.
        stats_fields: names of the figures that each record holds, in order.
        first_step: number of the first step under it; a later run that begins earlier was resumed from a checkpoint.
        started: when it was written, in seconds since 1970.
    """

    version: str
    code_version: str
    planner: str
    settings: dict[str, Any]
    towers: MediaTowers
    num_ranks: int
    cp_size: int
    phases: tuple[str, ...]
    node_of_rank: tuple[int, ...]
    peers: list[list[int]] | None
    stats_fields: tuple[str, ...]
    first_step: int
    started: float

    @classmethod
    def of(cls, step: PackedStep, started: float) -> "RunHeader":
        """Return the header of the steps that are planned as a step was."""
        context = step.context
        num_ranks = step.plan.num_ranks
        peers = context.channel.peers
        if context.config.scope == "rank":
            peers = [[rank] for rank in range(num_ranks)]
        return cls(
            version=__version__,
            code_version=CODE_VERSION,
            planner=context.planner,
            settings=msgspec.to_builtins(context.config),
            towers=context.towers,
            num_ranks=num_ranks,
            cp_size=context.cp_size,
            phases=context.phases,
            node_of_rank=tuple(context.channel.node_of_rank),
            peers=peers,
            stats_fields=StepStats.__struct_fields__,
            first_step=step.stats.step,
            started=started,
        )

    @classmethod
    def decode(cls, data: bytes) -> "RunHeader":
        """Return a header from its msgpack bytes.

        Raises:
            ValueError: the steps under it have other figures than those of this version.
        """
        header = msgspec.msgpack.decode(data, type=cls)
        if header.stats_fields != StepStats.__struct_fields__:
            raise ValueError(f"recorded by evenpack {header.version}, this is {__version__}: the figures of a step differ")
        return header

    def says_the_same(self, other: "RunHeader") -> bool:
        """Return whether steps under another header were planned under the same settings."""
        return msgspec.structs.replace(other, first_step=self.first_step, started=self.started) == self

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's settings.

        Raises:
            ValueError: settings that this version does not know.
        """
        try:
            return SchedulerConfig.from_dict(self.settings)
        except ValueError as error:
            raise ValueError(f"recorded by evenpack {self.version}, this is {__version__}: {error}") from None
