"""Groups in a pack: prefixes and branches as segments of the row, and which slots each of them sees."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ...core import Sample, SampleGroup, members_of


class Piece(NamedTuple):
    """A segment of a pack: some tokens of one sample.

    Attributes:
        sample: number of the sample among those of the pack.
        start: its first token, in the tensors of the sample.
        stop: end of its tokens.
        at: its first token, in the whole sample.
        prefix: number of the segment that it sees before itself, -1 for none.
        joined: whether the next segment belongs to the same group.
        is_shared: whether it is the prefix of a group.
    """

    sample: int
    start: int
    stop: int
    at: int = 0
    prefix: int = -1
    joined: bool = False
    is_shared: bool = False


class PackTree(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Which segments make up the samples of a pack that holds groups.

    Attributes:
        segments: int64 [members, 2], segment of each sample's prefix, -1 for none, and of what is its own.
        group_of: int64 [members], number of each sample's group in the pack.
    """

    segments: np.ndarray
    group_of: np.ndarray


def pieces_of(units: Sequence[Sample | SampleGroup]) -> list[Piece]:
    """Return the segments of a pack in order."""
    pieces: list[Piece] = []
    num_samples = 0
    for unit in units:
        if isinstance(unit, Sample):
            pieces.append(Piece(num_samples, 0, unit.num_tokens))
            num_samples += 1
            continue
        shared, prefix = unit.prefix, -1
        if shared:
            prefix = len(pieces)
            pieces.append(Piece(num_samples, 0, shared, joined=True, is_shared=True))
        for number, member in enumerate(unit.members):
            cut = shared if number == 0 else 0  # the first member is whole
            stop = member.num_tokens - (0 if number == 0 else shared)
            last = number + 1 == len(unit.members)
            pieces.append(Piece(num_samples, cut, stop, at=shared, prefix=prefix, joined=not last))
            num_samples += 1
    return pieces


def pack_tree(units: Sequence[Sample | SampleGroup], pieces: Sequence[Piece]) -> PackTree:
    """Return which segments make up the samples of a pack."""
    own = [(piece.prefix, number) for number, piece in enumerate(pieces) if not piece.is_shared]
    numbers: dict[object, int] = {}
    group_of = []
    for at, unit in enumerate(units):
        members = members_of(unit)
        name = members[0].values.get("group_id")  # parts of one group may meet in one pack
        number = numbers.setdefault((None, at) if name is None else name, len(numbers))
        group_of += [number] * len(members)
    return PackTree(segments=np.array(own, np.int64), group_of=np.array(group_of, np.int64))


def seen_slots(pieces: Sequence[Piece], cu_padded: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots that each segment sees, its prefix before its own, and where each segment's begin among them.

    Args:
        pieces: the segments; those beyond are tails.
        cu_padded: int64 [S + 1], boundaries of the segments.

    Returns:
        int64 [K] and int64 [S + 1].
    """
    cu = cu_padded.tolist()
    seen: list[np.ndarray] = []
    for number in range(len(cu) - 1):
        slots = np.arange(cu[number], cu[number + 1])
        prefix = pieces[number].prefix if number < len(pieces) else -1
        seen.append(slots if prefix < 0 else np.concatenate([np.arange(cu[prefix], cu[prefix + 1]), slots]))
    return np.concatenate(seen), np.cumsum([0, *map(len, seen)])


def rows_alone(
    samples: Sequence[Sample], pieces: Sequence[Piece], lengths: np.ndarray, padded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return boundaries of the samples laid out one by one, and the slot of that row that each slot of the pack takes.

    What follows from a layout (positions, anchors) is computed for the sample alone: a branch continues its prefix.

    Args:
        samples: the samples.
        pieces: the segments.
        lengths: int64 [S], real tokens of the segments, tails included.
        padded: int64 [S], their slots.
    """
    padding = (padded - lengths)[: len(pieces)]
    alone = np.array([sample.num_tokens for sample in samples], np.int64)
    for piece, gap in zip(pieces, padding.tolist(), strict=True):
        alone[piece.sample] += gap  # behind a sample's last token, so at most once
    tail = padded[len(pieces) :]
    cu = np.concatenate(([0], np.cumsum(np.concatenate((alone, tail)))))
    slots = [cu[piece.sample] + piece.at + np.arange(size) for piece, size in zip(pieces, padded.tolist(), strict=False)]
    slots += [np.arange(cu[len(samples)], cu[-1])]
    return cu, np.concatenate(slots)
