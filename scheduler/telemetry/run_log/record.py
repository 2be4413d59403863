"""What is recorded: the settings of a run, and each step; from a step to bytes, and back to its table, plan and figures."""

from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ...._version import __version__  # pyright: ignore[reportMissingImports]
from ....core import round_up
from ...config import SchedulerConfig
from ...plan import CODE_VERSION, MediaTowers, SampleTable, StepPlan, plan_fixed
from ...plan.table import Ints
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
        context, num_ranks = step.context, step.plan.num_ranks
        alone = [[rank] for rank in range(num_ranks)] if context.config.scope == "rank" else None
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
            peers=alone or context.channel.peers,
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


#: Smallest value, type ("" if all values are equal), number of values, and the values less the smallest.
_Column = tuple[int, str, int, bytes]


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """A step on disk. `home` counts the samples of each rank: a table is in the order of the ranks."""

    stats: list[Any]
    num_microbatches: int
    value: int
    lower_bound: int
    num_pairs: int
    digest: bytes
    home: _Column
    tokens: _Column
    targets_missing: _Column  # tokens less loss tokens
    nbytes: _Column
    media: _Column
    moved: _Column  # rank less home, rank -1 where dropped
    microbatch: _Column
    cost: list[_Column]


def _pack(values: Ints) -> _Column:
    """Return a column in the narrowest type that holds it.

    A general compressor would save another third, and cost as much time as planning the step.
    """
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if low == high:
        return low, "", len(values), b""
    dtype = np.min_scalar_type(high - low)
    return low, dtype.newbyteorder("<").str, len(values), (values - low).astype(dtype).tobytes()


def _unpack(column: _Column) -> Ints:
    low, dtype, count, data = column
    return np.frombuffer(data, dtype).astype(np.int64) + low if dtype else np.full(count, low, np.int64)


def encode_step(stats: StepStats, table: SampleTable, plan: StepPlan) -> bytes:
    """Return a step as bytes."""
    assert len(table) < 2 or (np.diff(table.home) >= 0).all(), "a table is in the order of the ranks"
    record = _Record(
        stats=list(msgspec.structs.astuple(stats)),
        num_microbatches=plan.num_microbatches,
        value=plan.value,
        lower_bound=plan.lower_bound,
        num_pairs=plan.num_pairs,
        digest=plan.digest,
        home=_pack(np.bincount(table.home, minlength=plan.num_ranks)),
        tokens=_pack(table.tokens),
        targets_missing=_pack(table.tokens - table.loss_tokens),
        nbytes=_pack(table.nbytes),
        media=_pack(table.media),
        moved=_pack(plan.rank - table.home),
        microbatch=_pack(plan.microbatch),
        cost=[_pack(np.ascontiguousarray(column)) for column in table.cost.reshape(len(table), -1).T],
    )
    return msgspec.msgpack.encode(record)


def decode_step(data: bytes, header: RunHeader) -> "RecordedStep":
    """Return a step, planned under a header, from its bytes."""
    record = msgspec.msgpack.decode(data, type=_Record)
    return RecordedStep(
        header=header,
        stats=msgspec.convert(dict(zip(header.stats_fields, record.stats, strict=True)), StepStats),
        num_microbatches=record.num_microbatches,
        value=record.value,
        lower_bound=record.lower_bound,
        digest=record.digest,
        num_bytes=len(data),
        _record=record,
    )


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A step that was read from a run log.

    Attributes:
        header: settings it was planned under.
        stats: its figures, times among them.
        num_microbatches: M.
        value: the plan's objective.
        lower_bound: lower bound of the objective.
        digest: of the plan.
        num_bytes: size of the record.
    """

    header: RunHeader
    stats: StepStats
    num_microbatches: int
    value: int
    lower_bound: int
    digest: bytes
    num_bytes: int
    _record: _Record

    @cached_property
    def table(self) -> SampleTable:
        """The samples of the step, as they were planned."""
        record = self._record
        tokens = _unpack(record.tokens)
        align = self.header.config.segment_align(self.header.cp_size)
        columns = [_unpack(column) for column in record.cost]
        return SampleTable(
            tokens=tokens,
            padded=round_up(tokens, align),
            nbytes=_unpack(record.nbytes),
            home=np.repeat(np.arange(record.home[2]), _unpack(record.home)),
            media=_unpack(record.media),
            loss_tokens=tokens - _unpack(record.targets_missing),
            cost=np.stack(columns, axis=1) if columns else np.zeros((len(tokens), len(self.header.phases)), np.int64),
        )

    @cached_property
    def rank(self) -> Ints:
        """`[N]` int64, rank of each sample, -1 where it was dropped."""
        return self.table.home + _unpack(self._record.moved)

    @cached_property
    def microbatch(self) -> Ints:
        """`[N]` int64, micro-batch of each sample, -1 where it was dropped."""
        return _unpack(self._record.microbatch)

    @cached_property
    def plan(self) -> StepPlan:
        """The plan: sums, dummies and pack order follow from the assignment, the certificate is as recorded."""
        header, table, kept = self.header, self.table, np.flatnonzero(self.rank >= 0)
        config = msgspec.structs.replace(header.config, num_microbatches=self.num_microbatches, lookahead=1)
        rebuilt = plan_fixed(
            table.select(kept),
            self.rank[kept],
            self.microbatch[kept],
            num_ranks=header.num_ranks,
            config=config,
            towers=header.towers,
            cp_size=header.cp_size,
        )
        return msgspec.structs.replace(
            rebuilt,
            rank=self.rank,
            microbatch=self.microbatch,
            value=self.value,
            lower_bound=self.lower_bound,
            gap=self.stats.gap,
            imbalance=self.stats.imbalance,
            moved_bytes=self.stats.moved_bytes,
            moved_bytes_lower_bound=self.stats.moved_bytes_lower_bound,
            num_pairs=self._record.num_pairs,
            digest=self.digest,
            _order=kept[rebuilt._order],
        )
