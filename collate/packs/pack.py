"""From samples to a pack: segments laid end to end in one row; each field one allocation, every sample copied once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...core import IGNORED, Field, FieldShapeError, Sample, SampleGroup, SampleLayout, members_of
from ...core.fields import dtype_name
from ...core.sample import Value
from ...models.adapter import ModelAdapter
from ...models.layout.positions import pack_positions, pack_runs
from ..samples.prepare import TYPES, prepare_sample
from .batch import PackedBatch
from .row import Boundaries, check_pack
from .tree import Piece, pack_tree, pieces_of, rows_alone, seen_slots

#: Token fields that have an attribute of their own.
_OWN = ("input_ids", "labels", "loss_weights", TYPES)


def pack_samples(
    samples: Sequence[Sample | SampleGroup | Mapping[str, Any]],
    *,
    adapter: ModelAdapter,
    align: int = 1,
    pack_align: int = 1,
    pad_to: int | None = None,
    max_segments: int | None = None,
    max_seqlen: int | None = None,
    num_dummies: int = 0,
    weight_scales: Sequence[float] | None = None,
    pin_memory: bool = False,
) -> PackedBatch:
    """Pack samples into one THD row.

    Args:
        samples: prepared samples, or raw mappings, which are prepared here; in segment order. A group (`fold_group`) holds
            several: what they share is packed once.
        adapter: the model family.
        align: multiple to which every segment is padded (2 * cp with context parallelism, times tp with sequence
            parallelism).
        pack_align: multiple to which the whole row is padded by a tail, itself a multiple of `align`.
        pad_to: slots of the row, for static shapes; None for as few as fit.
        max_segments: entries of the boundaries are `max_segments + 1`, for static shapes: trailing ones repeat the last
            boundary, and `num_segments` counts the live ones. A tail is a segment. None for as many as there are.
        max_seqlen: constant to report as the longest segment, for captured graphs; None for the longest.
        num_dummies: how many of the last samples are zero-loss dummies, which have no `sample_id`.
        weight_scales: factor on each sample's loss weights, members of groups one by one; None for 1.
        pin_memory: whether to build the tensors in pinned host memory.

    Returns:
        The pack, in host memory (fields whose samples lie on a device stay there).

    Raises:
        ValueError: no sample, settings that exclude one another, or more segments than `max_segments`.
        OversizeSampleError: more slots than `pad_to`.
        SampleError: a raw sample that `prepare_sample` refuses, or samples whose fields differ.

    Example:
        >>> from evenpack.models import adapter_for
        >>> pack = pack_samples([{"input_ids": [1, 2, 3]}, {"input_ids": [7, 8]}], adapter=adapter_for("text"))
        >>> pack.labels.tolist(), pack.cu_seqlens_q.tolist()
        ([[2, 3, -100, 8, -100]], [0, 3, 5])
    """
    if not 0 <= num_dummies <= len(samples) or not samples:
        raise ValueError(f"a pack needs samples, at most all of them dummies: got {len(samples)}, num_dummies={num_dummies}")
    units = [prepared(sample, index, adapter) for index, sample in enumerate(samples)]
    ready = [member for unit in units for member in members_of(unit)]
    if weight_scales is not None and len(weight_scales) != len(ready):
        raise ValueError(f"{len(weight_scales)} weight_scales for {len(ready)} samples")
    pieces = pieces_of(units) if any(isinstance(unit, SampleGroup) for unit in units) else None
    lengths = [one.num_tokens for one in ready] if pieces is None else [piece.stop - piece.start for piece in pieces]
    joined = None if pieces is None else [piece.joined for piece in pieces]
    bounds = Boundaries(lengths, align=align, pack_align=pack_align, pad_to=pad_to, joined=joined)
    real, padded = _boundary_tensors(bounds, max_segments, pin_memory)
    labels, weights = pack_targets(ready, weight_scales, bounds, pin_memory, pieces)
    num_samples = len(ready) - num_dummies
    num_tails = bounds.num_segments - len(lengths)
    names = [sample.sample_id for sample in ready[:num_samples]]
    batch = PackedBatch(
        adapter=adapter,
        bounds=bounds,
        labels=labels.unsqueeze(0),
        loss_mask=weights.unsqueeze(0),
        cu_seqlens_q=real,
        cu_seqlens_q_padded=padded,
        max_seqlen_q=_reported_length(bounds, max_seqlen),
        sample_ids=names + [None] * (num_dummies + num_tails),
        loss_tokens=num_targets(weights),
        num_samples=num_samples,
        num_spelled=sum(sample.layout.num_spelled for sample in ready),
        **({} if pieces is None else _tree_of(units, pieces, bounds, pin_memory)),
        **_row_tensors(ready, bounds, adapter, pin_memory, pieces),
        **_further_fields(ready, num_dummies, bounds, adapter, pin_memory, pieces),
    )
    check_pack(batch)
    return batch


def prepared(sample: Sample | SampleGroup | Mapping[str, Any], index: int, adapter: ModelAdapter) -> Sample | SampleGroup:
    """Return a prepared sample or a group; a raw sample is named by its place and its id in errors."""
    if isinstance(sample, Sample | SampleGroup):
        return sample
    name = sample.get("sample_id") if isinstance(sample, Mapping) else None
    where = f"sample {index}" if name is None else f"sample {index} ({name!r})"
    return prepare_sample(sample, adapter=adapter, where=where)


def _boundary_tensors(bounds: Boundaries, max_segments: int | None, pin: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return real and padded boundaries, int32 [S + 1] or [max_segments + 1]; one object where nothing is padded.

    Transformer Engine tells by identity whether there is padding between segments.
    """
    extra = 0 if max_segments is None else max_segments - bounds.num_segments
    if extra < 0:
        raise ValueError(f"a pack of {bounds.num_segments} segments (a tail counts as one) exceeds max_segments={max_segments}")
    real = _on_host(_filled_up(bounds.cu_real, extra), pin)
    return (real, _on_host(_filled_up(bounds.cu_padded, extra), pin)) if bounds.has_padding else (real, real)


def _filled_up(cu: np.ndarray, extra: int) -> np.ndarray:
    """Return boundaries as int32, the last one repeated `extra` times."""
    return (np.pad(cu, (0, extra), "edge") if extra else cu).astype(np.int32)


def _reported_length(bounds: Boundaries, max_seqlen: int | None) -> int:
    """Return the longest padded segment, or the constant to report in its place."""
    longest = int(bounds.padded.max())
    if max_seqlen is not None and max_seqlen < longest:
        at = int(bounds.padded.argmax())
        what = "the tail of the row" if not bounds.lengths[at] else f"segment {at}"
        raise ValueError(f"max_seqlen={max_seqlen} is less than the longest segment, {longest} slots ({what})")
    return longest if max_seqlen is None else max_seqlen


def _tree_of(units: Sequence[Sample | SampleGroup], pieces: Sequence[Piece], bounds: Boundaries, pin: bool) -> dict[str, Any]:
    """Return which segments make up the samples, and what segments see where groups share a prefix."""
    found: dict[str, Any] = {"tree": pack_tree(units, pieces)}
    if any(piece.is_shared for piece in pieces):
        index, cu_seen = seen_slots(pieces, bounds.cu_padded)
        found |= {"key_index": _on_host(index, pin), "cu_seen": _on_host(cu_seen.astype(np.int32), pin)}
    return found


def _row_tensors(
    samples: Sequence[Sample], bounds: Boundaries, adapter: ModelAdapter, pin: bool, pieces: Sequence[Piece] | None
) -> dict[str, Any]:
    """Return ids, positions and masks of a row; all but the ids follow from layouts and boundaries, on the host."""
    layouts = [sample.layout for sample in samples]
    tokens = _cut([sample.tensor("input_ids") for sample in samples], 0, pieces)
    ids = lay_out(tokens, 0, adapter.pad_token_id, bounds, pin)
    cu, slots = (bounds.cu_padded, None) if pieces is None else rows_alone(samples, pieces, bounds.lengths, bounds.padded)
    found = pack_positions(layouts, cu, adapter)
    types, anchors = type_ids(layouts, cu)
    if slots is not None:
        found, types, anchors = found[:, slots], types[slots], anchors[slots]
    positions = _on_host(found, pin)
    segment_ids = _on_host(bounds.segment_ids[None], pin)
    return {
        "input_ids": ids.unsqueeze(0),
        "position_ids": positions if adapter.rope == "1d" else positions[:, None],
        "padding_mask": _on_host(bounds.padding_mask[None], pin),
        "mm_token_type_ids": _on_host(types[None], pin),
        "media_token_validity_mask": _on_host(anchors[None], pin),
        "segment_ids": segment_ids,
        "seq_idx": segment_ids,
    }


def _further_fields(
    samples: Sequence[Sample],
    num_dummies: int,
    bounds: Boundaries,
    adapter: ModelAdapter,
    pin: bool,
    pieces: Sequence[Piece] | None,
) -> dict[str, Any]:
    """Return media, further token fields and per-sample fields; token and media fields that no sample has are absent."""
    tokens = [field for field in adapter.fields.of_kind("token") if field.name not in _OWN]
    columns = {field.name: pack_tokens(field, samples, num_dummies, bounds, pin, pieces) for field in tokens}
    num_entries = len(samples) + bounds.num_segments - (len(samples) if pieces is None else len(pieces))
    has_groups = any("group_id" in sample.values for sample in samples)
    unseen = ("sample_id",) if has_groups else ("sample_id", "group_id")
    per_sample = [field for field in adapter.fields.of_kind("sample") if field.name not in unseen]
    return {
        "media": pack_media(adapter.fields.of_kind("media"), samples, num_dummies, pin),
        "token_fields": {name: column for name, column in columns.items() if column is not None},
        "sample_fields": {field.name: pack_values(field, samples, num_entries) for field in per_sample},
    }


def type_ids(layouts: Sequence[SampleLayout], cu_padded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `mm_token_type_ids` of a pack, int64 [T], 0 at text and padding, and where they are not 0, bool [T]."""
    types, anchors = np.zeros(cu_padded[-1], np.int64), np.zeros(cu_padded[-1], np.bool_)
    if any(len(layout.runs) for layout in layouts):
        runs, _ = pack_runs(layouts, cu_padded)
        for start, length, code in runs[:, :3].tolist():
            types[start : start + length], anchors[start : start + length] = code, True
    return types, anchors


def _cut(tensors: Sequence[torch.Tensor], axis: int, pieces: Sequence[Piece] | None) -> Sequence[torch.Tensor]:
    """Return one view per segment of tensors of samples; targets end one place before their sample does."""
    if pieces is None:
        return tensors
    sizes = [tensor.shape[axis] for tensor in tensors]
    stops = [max(piece.start, min(piece.stop, sizes[piece.sample])) for piece in pieces]
    return [
        tensors[piece.sample].narrow(axis, piece.start, stop - piece.start) for piece, stop in zip(pieces, stops, strict=True)
    ]


def _on_host(array: np.ndarray, pin: bool) -> torch.Tensor:
    """Return an array as a tensor, in pinned memory if `pin`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return concatenate([tensor], 0, pin) if pin else tensor


def concatenate(pieces: Sequence[torch.Tensor], axis: int, pin: bool) -> torch.Tensor:
    """Return pieces end to end along an axis, in one new tensor (pinned host memory if `pin`)."""
    if not pin or pieces[0].device.type != "cpu":
        return torch.cat(list(pieces), dim=axis)
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    out = torch.empty(shape, dtype=pieces[0].dtype, pin_memory=True)
    return torch.cat(list(pieces), dim=axis, out=out)


def lay_out(pieces: Sequence[torch.Tensor], axis: int, pad: float, bounds: Boundaries, pin: bool) -> torch.Tensor:
    """Return one piece per sample laid end to end, each filled up to its segment's slots, and the tail.

    Args:
        pieces: one per sample, at most as long as its segment along `axis`.
        axis: packed axis.
        pad: value of the slots that a piece leaves, and of the tail.
        bounds: the pack's boundaries.
        pin: whether to use pinned host memory.
    """
    slots = bounds.padded.tolist()
    gaps = [size - piece.shape[axis] for size, piece in zip(slots, pieces, strict=False)] + slots[len(pieces) :]
    assert min(gaps) >= 0, "a piece is longer than its segment"
    if not any(gaps):
        return concatenate(pieces, axis, pin)
    shape = list(pieces[0].shape)
    shape[axis] = max(gaps)
    padding = pieces[0].new_full(shape, pad)  # contiguous: torch.cat is slow as soon as one piece is not
    parts: list[torch.Tensor] = []
    for index, gap in enumerate(gaps):
        if index < len(pieces):
            parts.append(pieces[index])
        if gap:
            parts.append(padding.narrow(axis, 0, gap))
    return concatenate(parts, axis, pin)


def pack_targets(
    samples: Sequence[Sample],
    scales: Sequence[float] | None,
    bounds: Boundaries,
    pin: bool,
    pieces: Sequence[Piece] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets int64 [T] and their weights float32 [T] of a pack: next-token targets of each sample, laid out.

    Position i learns token i + 1, with the weight of that token, and the last position of a sample learns nothing: a target
    never crosses into the next segment. A sample that came shifted passes unchanged, its last target kept.

    Args:
        samples: the samples, in order.
        scales: factor on each sample's weights; None for 1.
        bounds: the pack's boundaries.
        pin: whether to use pinned host memory.
        pieces: the segments, where some samples are members of groups.
    """
    views = [sample.targets for sample in samples]
    labels = lay_out(_cut([targets for targets, _ in views], 0, pieces), 0, IGNORED, bounds, pin)
    weights = lay_out(_cut([weight for _, weight in views], 0, pieces), 0, 0.0, bounds, pin)
    if scales is not None:
        scales = scales if pieces is None else [scales[piece.sample] for piece in pieces]
        for scale, start, stop in zip(scales, bounds.cu_padded.tolist(), bounds.cu_padded[1:].tolist(), strict=False):
            weights[start:stop] *= scale
    if not (labels.is_cpu and weights.is_cpu):
        return labels, weights.masked_fill_(labels == IGNORED, 0.0)
    # Arrays of this size are worked through several times as fast as tensors.
    np.putmask(weights.numpy(), labels.numpy() == IGNORED, 0.0)
    return labels, weights


def num_targets(weights: torch.Tensor) -> int:
    """Return how many weights are not 0."""
    return int(np.count_nonzero(weights.numpy() != 0) if weights.is_cpu else torch.count_nonzero(weights))


def pack_tokens(
    field: Field,
    samples: Sequence[Sample],
    num_dummies: int,
    bounds: Boundaries,
    pin: bool,
    pieces: Sequence[Piece] | None = None,
) -> torch.Tensor | None:
    """Return a further token field of a pack with a batch axis before the packed one; None where no sample has it.

    Dummies that lack the field are padding in it.

    Raises:
        FieldShapeError: only some samples have the field, or samples differ in dtype, device or sizes.
    """
    present = [sample for sample in samples if field.name in sample.values]
    if not present:
        return None
    like = present[0].tensor(field.name)
    values: list[torch.Tensor] = []
    for index, sample in enumerate(samples):
        if field.name in sample.values:
            values.append(sample.tensor(field.name))
        elif index >= len(samples) - num_dummies:
            shape = list(like.shape)
            shape[field.axis] = 0
            values.append(like.new_empty(shape))
        else:
            raise FieldShapeError(f"{len(present)} of {len(samples)} samples have {field.name!r}, which has no default")
    _check_alike(field, values)
    return lay_out(_cut(values, field.axis, pieces), field.axis, field.pad, bounds, pin).unsqueeze(field.axis)


def pack_media(fields: Sequence[Field], samples: Sequence[Sample], num_dummies: int, pin: bool) -> dict[str, torch.Tensor]:
    """Return the media fields of a pack: rows of all samples, in segment order. Fields that no sample has are absent.

    Rows of a free size (sounds of different lengths) are padded to the longest. Dummies take the dtype and device of the
    others, and lack the optional fields that the others lack.

    Raises:
        FieldShapeError: a sample with items of a modality lacks a field that others have, or samples differ in dtype,
            device or sizes.
    """
    media: dict[str, torch.Tensor] = {}
    real, dummies = samples[: len(samples) - num_dummies], samples[len(samples) - num_dummies :]
    for field in fields:
        same = [other.name for other in fields if other.modality == field.modality]
        with_items = [sample for sample in real if any(name in sample.values for name in same)]
        pieces = [sample.tensor(field.name) for sample in with_items if field.name in sample.values]
        if field.rows != "free" and len(pieces) not in (0, len(with_items)):
            what = f"{len(pieces)} of {len(with_items)} samples with {field.modality} items"
            raise FieldShapeError(f"{what} have {field.name!r}, which has no default")
        more = [dummy.tensor(field.name) for dummy in dummies if field.name in dummy.values]
        if pieces:
            pieces += [dummy.to(pieces[0]) for dummy in more]
        elif not with_items:
            pieces = more
        if pieces:
            pieces = _same_sizes(field, pieces)
            _check_alike(field, pieces)
            media[field.name] = concatenate(pieces, field.axis, pin)
    return media


def _same_sizes(field: Field, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return pieces with their free sizes filled up to the largest; the pieces themselves where they agree."""
    if field.shape is None or None not in field.shape:
        return pieces
    free = [axis + (axis >= field.axis) for axis, size in enumerate(field.shape) if size is None]
    largest = {axis: max(piece.shape[axis] for piece in pieces) for axis in free}
    if all(piece.shape[axis] == size for piece in pieces for axis, size in largest.items()):
        return pieces
    padded: list[torch.Tensor] = []
    for piece in pieces:
        wide = piece.new_full([largest.get(axis, size) for axis, size in enumerate(piece.shape)], field.pad)
        wide[tuple(slice(n) for n in piece.shape)] = piece
        padded.append(wide)
    return padded


def _check_alike(field: Field, pieces: Sequence[torch.Tensor]) -> None:
    """Check that pieces can lie in one tensor.

    Raises:
        FieldShapeError: two dtypes, devices or row shapes; both are named.
    """

    def kind(piece: torch.Tensor) -> tuple[str, str, list[int]]:
        return dtype_name(piece.dtype), str(piece.device), [n for axis, n in enumerate(piece.shape) if axis != field.axis]

    for piece in pieces[1:]:
        if kind(piece) != kind(pieces[0]):
            raise FieldShapeError(f"samples of one pack differ in {field.name!r}: {kind(pieces[0])} and {kind(piece)}")


def pack_values(field: Field, samples: Sequence[Sample], num_segments: int) -> list[Value]:
    """Return a per-sample field of a pack, one entry per segment; None for a tail and where a sample has no value.

    Tensors are copied: a received one is a view of a buffer that is used again, perhaps while a copy to a device still reads.
    """
    values = [sample.values.get(field.name) for sample in samples]
    own = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    return own + [None] * (num_segments - len(samples))
