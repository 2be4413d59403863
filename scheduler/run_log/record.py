"""One recorded step: from a step to bytes, and back to its table, its plan and its figures."""

from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..plan import SampleTable, StepPlan
from ..plan.fixed import plan_fixed
from ..plan.table import Ints
from ..stats import StepStats
from .columns import Column, pack, unpack
from .header import RunHeader


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """A step on disk. `home` counts the samples of each rank: a table is in the order of the ranks."""

    stats: list[Any]
    num_microbatches: int
    value: int
    lower_bound: int
    num_pairs: int
    digest: bytes
    home: Column
    tokens: Column
    targets_missing: Column  # tokens less loss tokens
    nbytes: Column
    media: Column
    moved: Column  # rank less home, rank -1 where dropped
    microbatch: Column
    cost: list[Column]
    header: int = 0  # number of the header that it was planned under, among those of the file


#: First byte of a payload: what it holds.
_HEADER, _STEP = b"H", b"S"

_ENCODER = msgspec.msgpack.Encoder()
_HEADERS = msgspec.msgpack.Decoder(RunHeader)
_RECORDS = msgspec.msgpack.Decoder(_Record)


class LostHeaderError(ValueError):
    """A step whose header was lost: what it was planned under is not known."""


def encode_header(header: RunHeader) -> bytes:
    """Return a header as the payload of a frame."""
    return _HEADER + _ENCODER.encode(header)


def encode_step(stats: StepStats, table: SampleTable, plan: StepPlan, header: int = 0) -> bytes:
    """Return a step as the payload of a frame; `header` is the number of its header."""
    assert len(table) < 2 or (np.diff(table.home) >= 0).all(), "a table is in the order of the ranks"
    record = _Record(
        stats=list(msgspec.structs.astuple(stats)),
        num_microbatches=plan.num_microbatches,
        value=plan.value,
        lower_bound=plan.lower_bound,
        num_pairs=plan.num_pairs,
        digest=plan.digest,
        home=pack(np.bincount(table.home, minlength=plan.num_ranks)),
        tokens=pack(table.tokens),
        targets_missing=pack(table.tokens - table.loss_tokens),
        nbytes=pack(table.nbytes),
        media=pack(table.media),
        moved=pack(plan.rank - table.home),
        microbatch=pack(plan.microbatch),
        cost=[pack(np.ascontiguousarray(column)) for column in table.cost.reshape(len(table), -1).T],
        header=header,
    )
    return _STEP + _ENCODER.encode(record)


def decode(payload: bytes, header: RunHeader | None) -> "RunHeader | RecordedStep":
    """Return what a frame holds.

    Args:
        payload: of the frame.
        header: the last one before it in the file, where one was read already.

    Raises:
        LostHeaderError: a step whose header is not the last that was read.
        ValueError: not a payload of this version.
    """
    if payload[:1] == _HEADER:
        return _HEADERS.decode(payload[1:])
    if payload[:1] != _STEP:
        raise ValueError(f"a record of kind {payload[:1]!r}")
    if header is None:
        raise LostHeaderError("a step without a header before it")
    record = _RECORDS.decode(payload[1:])
    if record.header != header.number:
        raise LostHeaderError(f"a step of header {record.header} behind header {header.number}")
    values = dict(zip(header.stats_fields, record.stats, strict=True))
    known = {name: values[name] for name in StepStats.__struct_fields__ if name in values}
    return RecordedStep(header=header, stats=StepStats(**known), num_bytes=len(payload), _record=record)


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A step that was read from a run log.

    Attributes:
        header: settings it was planned under.
        stats: its figures, times among them.
        num_bytes: size of the record.
    """

    header: RunHeader
    stats: StepStats
    num_bytes: int
    _record: _Record

    @property
    def value(self) -> int:
        """The plan's objective."""
        return self._record.value

    @property
    def lower_bound(self) -> int:
        """Lower bound of the objective."""
        return self._record.lower_bound

    @property
    def digest(self) -> bytes:
        """Digest of the plan."""
        return self._record.digest

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self._record.num_microbatches

    @cached_property
    def table(self) -> SampleTable:
        """The samples of the step, as they were planned."""
        record = self._record
        tokens = unpack(record.tokens)
        align = self.header.config.segment_align(self.header.cp_size)
        columns = [unpack(column) for column in record.cost]
        return SampleTable(
            tokens=tokens,
            padded=-(-tokens // align) * align,
            nbytes=unpack(record.nbytes),
            home=np.repeat(np.arange(record.home.count), unpack(record.home)),
            media=unpack(record.media),
            loss_tokens=tokens - unpack(record.targets_missing),
            cost=np.stack(columns, axis=1) if columns else np.zeros((len(tokens), len(self.header.phases)), np.int64),
        )

    @cached_property
    def rank(self) -> Ints:
        """`[N]` int64, rank of each sample, -1 where it was dropped."""
        return self.table.home + unpack(self._record.moved)

    @cached_property
    def microbatch(self) -> Ints:
        """`[N]` int64, micro-batch of each sample, -1 where it was dropped."""
        return unpack(self._record.microbatch)

    @cached_property
    def plan(self) -> StepPlan:
        """The plan: sums, dummies and pack order follow from the assignment, the certificate is as recorded."""
        header, table, kept = self.header, self.table, np.flatnonzero(self.rank >= 0)
        config = msgspec.structs.replace(header.config, num_microbatches=self.num_microbatches)
        rebuilt = plan_fixed(
            SampleTable(**{name: getattr(table, name)[kept] for name in SampleTable.__struct_fields__}),
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
