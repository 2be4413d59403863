"""Fields of a pack, each built flat: one allocation, every sample copied once to where it stays."""

from collections.abc import Sequence

import numpy as np
import torch

from ...core import IGNORED, Field, FieldShapeError, Sample
from ...core.fields import dtype_name
from ...core.sample import Value
from .row import Boundaries


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
    samples: Sequence[Sample], scales: Sequence[float] | None, bounds: Boundaries, pin: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets int64 [T] and their weights float32 [T] of a pack: next-token targets of each sample, laid out.

    Position i learns token i + 1, with the weight of that token, and the last position of a sample learns nothing: a target
    never crosses into the next segment. A sample that came shifted passes unchanged, its last target kept.

    Args:
        samples: the samples, in order.
        scales: factor on each sample's weights; None for 1.
        bounds: the pack's boundaries.
        pin: whether to use pinned host memory.
    """
    views = [sample.targets for sample in samples]
    labels = lay_out([targets for targets, _ in views], 0, IGNORED, bounds, pin)
    weights = lay_out([weight for _, weight in views], 0, 0.0, bounds, pin)
    if scales is not None:
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
    field: Field, samples: Sequence[Sample], num_dummies: int, bounds: Boundaries, pin: bool
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
    pieces: list[torch.Tensor] = []
    for index, sample in enumerate(samples):
        if field.name in sample.values:
            pieces.append(sample.tensor(field.name))
        elif index >= len(samples) - num_dummies:
            shape = list(like.shape)
            shape[field.axis] = 0
            pieces.append(like.new_empty(shape))
        else:
            raise FieldShapeError(f"{len(present)} of {len(samples)} samples have {field.name!r}, which has no default")
    _check_alike(field, pieces)
    return lay_out(pieces, field.axis, field.pad, bounds, pin).unsqueeze(field.axis)


def pack_media(fields: Sequence[Field], samples: Sequence[Sample], num_dummies: int, pin: bool) -> dict[str, torch.Tensor]:
    """Return the media fields of a pack: rows of all samples, in segment order. Fields that no sample has are absent.

    Rows of a free size (sounds of different lengths) are padded with zeros to the longest. Dummies take the dtype and
    device of the others, and lack the optional fields that the others lack.

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
        if len(pieces) not in (0, len(with_items)):
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
            media[field.name] = concatenate(pieces, 0, pin)
    return media


def _same_sizes(field: Field, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return pieces with their free sizes padded with zeros to the largest; the pieces themselves where they agree."""
    if field.shape is None or None not in field.shape or len({piece.shape[1:] for piece in pieces}) == 1:
        return pieces
    padded: list[torch.Tensor] = []
    for piece in pieces:
        sizes = [
            max(p.shape[axis] for p in pieces) if size is None else piece.shape[axis]
            for axis, size in enumerate(field.shape, 1)
        ]
        wide = piece.new_zeros((len(piece), *sizes))
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
