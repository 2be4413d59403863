"""Describe: check a raw sample on its own rank, and reduce it to one record of integers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash

from ...collate.samples.group import Groups, parts_of
from ...collate.samples.prepare import prepare_sample
from ...collate.samples.truncate import truncate_sample
from ...core import (
    FieldShapeError,
    OversizeSampleError,
    Sample,
    SampleGroup,
    layout_grids,
    media_codes,
    members_of,
    num_groups_of,
    round_up,
)
from ...core.fields import ANY, FLOAT, TENSOR_DTYPES, dtype_name, dtype_of
from ...core.sample import TYPE_CODES
from ...models import ModelAdapter, dummy_sample
from ..config import SchedulerConfig
from ..plan import MediaTowers
from ..plan.settings import MEDIA_BITS
from .blocks import Block

Grids = Sequence[tuple[int, int, int]]

#: Tensor fields of free dtype that a scheduler can take; more than any family declares.
MAX_FREE_DTYPES = 16
_GROUP_COLUMNS = (("num_members", "<u4"), ("num_trained", "<u4"), ("num_groups", "<u8"), ("tokens_squared", "<i8"))


def record_dtype(num_phases: int, *, groups: bool = False) -> np.dtype[np.void]:
    """Return the dtype of a sample's record: 40 bytes with one phase, 8 more with each further one.

    Where samples come in groups, a record is that of a group, and has its numbers of members, of members with a target, and of
    groups (0 for a further part of one), and the sum of the squares of the members' lengths.

    `media` has one bit per modality. `age` is 0 for a fresh sample; for one that a step before had in view it is W, the
    `lookahead`, less the steps until its turn. `list_index` is the number of its list in the step, with `scope="microbatch"`,
    or else of the step, among those collected together, in which a fresh sample has its turn. `id_hash` tells whether two
    samples have one `sample_id`, 0 where a sample has none.

    Example:
        >>> record_dtype(1).itemsize, record_dtype(2).itemsize
        (40, 48)
    """
    return np.dtype(
        [
            ("tokens", "<i4"),
            ("loss_tokens", "<i4"),
            ("media", "u1"),
            ("age", "u1"),
            ("list_index", "<u2"),
            ("weight", "<f4"),
            ("nbytes", "<i8"),
            ("id_hash", "<u8"),
            ("cost", "<i8", (num_phases,)),
            *(_GROUP_COLUMNS if groups else ()),
        ]
    )


class SampleCost(Protocol):
    """Integer costs of a sample, one per phase of the forward pass."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases, in order."""
        ...

    def sample_cost(self, tokens: int, grids: Grids) -> tuple[int, ...]:
        """Return the cost per phase of a sample of `tokens` tokens whose media have the patch grids (t, h, w)."""
        ...


class Described(msgspec.Struct, frozen=True):
    """A sample that is ready to be planned.

    Attributes:
        block: the sample, and its block's size.
        record: its metadata, one element of `record_dtype`.
    """

    block: Block
    record: np.ndarray

    @property
    def age(self) -> int:
        """W less the steps until the sample's turn, 0 for a fresh one."""
        return int(self.record["age"])

    def marked(self, **columns: int) -> "Described":
        """Return the sample with other values in columns of its record; a checkpoint may hold this one."""
        record = self.record.copy()
        for name, value in columns.items():
            record[name] = value
        return Described(self.block, record)


class Describer:
    """Checks and describes samples under one declaration.

    Args:
        adapter: the model family, with the user's fields.
        cost: cost of a sample.
        config: settings; `pixel_dtype`, `oversize` and `groups` are applied here.
        cp_size: context-parallel size.
        rank: this rank, for error messages.

    Attributes:
        capacity: padded tokens of a pack.
        heavy: most that a group of several members may cost before it is taken apart; None before the first step.
    """

    def __init__(self, *, adapter: ModelAdapter, cost: SampleCost, config: SchedulerConfig, cp_size: int, rank: int) -> None:
        self._adapter = adapter
        self._cost = cost
        self._rank = rank
        self._oversize = config.oversize
        self._budget = config.tokens_per_step
        self._by_sample = config.loss_average == "sample"
        self._align = config.segment_align(cp_size)
        self.capacity = config.capacity(cp_size)
        whole = config.max_tokens * cp_size
        times, multiple = f" on each of {cp_size} ranks" if cp_size > 1 else "", config.pack_align or self._align
        self._why = "" if self.capacity == whole else f" (max_tokens={config.max_tokens}{times}, in multiples of {multiple})"
        self._pixel_dtype = None if config.pixel_dtype is None else dtype_of(config.pixel_dtype)
        self._groups: Groups = config.groups
        self._record_dtype = record_dtype(len(cost.phases), groups=config.groups != "split")
        self._free = [field.name for field in adapter.fields if field.dtype in (FLOAT, ANY)]
        if len(self._free) > MAX_FREE_DTYPES:
            raise ValueError(f"{len(self._free)} fields of free dtype ({self._free}), at most {MAX_FREE_DTYPES} are possible")
        self._dtypes = bytearray(len(self._free))
        self._truncated = 0
        self.heavy: int | None = None

    @property
    def dtypes(self) -> bytes:
        """Code of the dtype of each field of free dtype, 0 where none was seen."""
        return bytes(self._dtypes)

    @property
    def free_fields(self) -> list[str]:
        """Names of the fields of free dtype, in the order of `dtypes`."""
        return list(self._free)

    def __call__(self, raw: Mapping[str, Any] | Sample, index: int) -> Described | None:
        """Describe one sample.

        Args:
            raw: what the source yielded.
            index: its number among this rank's samples, for error messages.

        Returns:
            The described sample, or None where `oversize="drop"` drops it.

        Raises:
            SampleError: the sample cannot be used; the message names rank, sample, value and limit.
        """
        name = raw.sample_id if isinstance(raw, Sample) else raw.get("sample_id") if isinstance(raw, Mapping) else None
        where = f"rank {self._rank}, sample {index if name is None else repr(name)}"
        sample = raw if isinstance(raw, Sample) else prepare_sample(raw, adapter=self._adapter, where=where)
        fitted = self._fit(sample, where)
        if fitted is None:
            return None
        if self._budget is not None and fitted.num_tokens > self._budget:
            raise OversizeSampleError(f"{where}: {fitted.num_tokens} tokens exceed tokens_per_step={self._budget}")
        return self.described(self._cast(fitted), where)

    def described_group(self, members: Sequence[Sample]) -> list[Described]:
        """Describe a group of samples that were checked before, in the fewest parts that fit.

        Raises:
            OversizeSampleError: a group that must stay together exceeds the capacity.
            FieldShapeError: members that differ in their fields.
        """
        where = f"rank {self._rank}, group {members[0].values['group_id']!r}"
        parts = parts_of(members, self._adapter, groups=self._groups, fits=self._has_room, is_heavy=self._is_heavy)
        for part in parts:
            padded = round_up(part.num_tokens, self._align)
            if padded > self.capacity:
                raise OversizeSampleError(
                    f"{where}: {len(members)} samples of {part.num_tokens} tokens ({padded} padded) exceed the capacity of "
                    f"{self.capacity} padded tokens a pack{self._why}; raise max_tokens, or let groups be taken apart "
                    "(groups='prompt', or 'split')"
                )
            if self._budget is not None and part.num_tokens > self._budget:
                raise OversizeSampleError(f"{where}: {part.num_tokens} tokens exceed tokens_per_step={self._budget}")
        return [self.described(part, where) for part in parts]

    def _has_room(self, group: SampleGroup) -> bool:
        return round_up(group.num_tokens, self._align) <= self.capacity

    def _is_heavy(self, group: SampleGroup) -> bool:
        return self.heavy is not None and sum(self._cost_of(group)) > self.heavy

    def described(self, sample: Sample | SampleGroup, where: str) -> Described:
        """Describe a sample or a group that was checked before."""
        for member in members_of(sample):
            self._note_dtypes(member)
        block = Block.of(sample)
        return Described(block, self._record(block, where))

    def use_cost(self, cost: SampleCost) -> None:
        """Describe further samples with another cost model of the same phases.

        Raises:
            ValueError: other phases.
        """
        if tuple(cost.phases) != tuple(self._cost.phases):
            raise ValueError(f"the cost model has phases {tuple(cost.phases)}, this scheduler plans {tuple(self._cost.phases)}")
        self._cost = cost

    def load_dtypes(self, dtypes: bytes) -> None:
        """Load the dtypes that an earlier run had seen."""
        assert len(dtypes) == len(self._dtypes), (len(dtypes), len(self._dtypes))
        self._dtypes = bytearray(dtypes)

    def take_truncated(self) -> int:
        """Return the number of samples that were cut since the last call."""
        truncated, self._truncated = self._truncated, 0
        return truncated

    def empty_records(self) -> np.ndarray:
        """Return no records, of the right dtype."""
        return np.zeros(0, self._record_dtype)

    def _fit(self, sample: Sample, where: str) -> Sample | None:
        padded = round_up(sample.num_tokens, self._align)
        if padded <= self.capacity:
            return sample
        if self._oversize == "drop":
            return None
        if self._oversize == "truncate":
            self._truncated += 1
            return truncate_sample(sample, self.capacity // self._align * self._align, self._adapter)
        raise OversizeSampleError(
            f"{where}: {sample.num_tokens} tokens ({padded} padded) exceed the capacity of {self.capacity} padded tokens "
            f"a pack{self._why}; raise max_tokens, or set oversize to 'drop' or 'truncate'"
        )

    def _cast(self, sample: Sample) -> Sample:
        if self._pixel_dtype is None:
            return sample
        values = dict(sample.values)
        for field in self._adapter.fields.of_kind("media"):
            value = values.get(field.name)
            if self._adapter.is_pixels(field) and isinstance(value, torch.Tensor):
                values[field.name] = value.to(self._pixel_dtype)
        return msgspec.structs.replace(sample, values=values)

    def _note_dtypes(self, sample: Sample) -> None:
        for position, name in enumerate(self._free):
            value = sample.values.get(name)
            if isinstance(value, torch.Tensor):
                code = TENSOR_DTYPES.index(dtype_name(value.dtype)) + 1
                if self._dtypes[position] not in (0, code):
                    code = len(TENSOR_DTYPES) + 1  # differs even on this rank: reported like ranks that differ
                self._dtypes[position] = code

    def _record(self, block: Block, where: str) -> np.ndarray:
        sample = block.sample
        loss_tokens, weight = sample.target_stats()
        members = members_of(sample)
        stats = [member.target_stats() for member in members] if len(members) > 1 else [(loss_tokens, weight)]
        if self._by_sample:
            for tokens, total in stats:
                if tokens and total <= 0:
                    raise FieldShapeError(f"{where}: loss_average='sample' needs loss weights that sum above 0, got {total}")
        more: tuple[int, ...] = ()
        if self._groups != "split":
            squared = sum(member.num_tokens**2 for member in members)
            more = (len(members), sum(tokens > 0 for tokens, _ in stats), num_groups_of(sample), squared)
        cost, name = self._cost_of(sample), id_hash(sample.sample_id)
        # In the order of `record_dtype`, at once: an assignment to one field takes as long.
        return np.array(
            (sample.num_tokens, loss_tokens, media_bits(sample), 0, 0, weight, block.nbytes, name, cost, *more),
            self._record_dtype,
        )

    def _cost_of(self, sample: Sample | SampleGroup) -> tuple[int, ...]:
        """Return the cost of a sample, or of a group: that of its members alone, with the prefix that they share once."""
        if isinstance(sample, Sample):
            grids = [grid for modality in TYPE_CODES for grid in sample.grids(modality)] if len(sample.layout.runs) else []
            return self._cost.sample_cost(sample.num_tokens, grids)
        costs = [self._cost.sample_cost(one.num_tokens, layout_grids(one.layout)) for one in sample.members]
        if sample.prefix:
            shared = self._cost.sample_cost(sample.prefix, layout_grids(sample.shared_layout))
            costs += [tuple(-value for value in shared)] * (len(sample.members) - 1)
        return tuple(max(0, sum(column)) for column in zip(*costs, strict=True))


def id_hash(sample_id: str | int | None) -> int:
    """Return 64 bits that stand for a sample's name, equal on every machine; 0 for none."""
    if sample_id is None:
        return 0
    return xxhash.xxh3_64_intdigest(f"{type(sample_id).__name__}:{sample_id}".encode(errors="backslashreplace")) or 1


def media_bits(sample: Sample | SampleGroup) -> int:
    """Return the bit flags of the media of a sample or a group: 1 image, 2 video, 4 audio."""
    members = members_of(sample)
    if not any(len(member.layout.runs) for member in members):
        return 0
    codes = media_codes(members)
    return sum(MEDIA_BITS[name] for name, code in TYPE_CODES.items() if code in codes)


def grid_bits(grids: Grids) -> int:
    """Return the bit flags of media known by their (t, h, w) grids alone: 1 image, 2 video; several frames are a video."""
    return int(any(t == 1 for t, _, _ in grids)) | 2 * any(t > 1 for t, _, _ in grids)


def media_towers(adapter: ModelAdapter, cost: SampleCost) -> MediaTowers:
    """Return what the planner must know of an adapter: trained towers, and the size and cost of dummy media."""
    dummies = {modality: dummy_sample(modality, adapter) for modality in adapter.dummy_grids}
    costs = {modality: cost.sample_cost(sample.num_tokens, sample.grids(modality)) for modality, sample in dummies.items()}
    return MediaTowers(
        trained=tuple(adapter.trained_modalities),
        shared=adapter.shared_towers,
        dummy_tokens={modality: sample.num_tokens for modality, sample in dummies.items()},
        dummy_cost=costs,
    )
