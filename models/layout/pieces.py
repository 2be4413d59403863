"""Anchors and items matched by their sums: an image may be written in several runs, and one run may hold several tiles."""

from collections.abc import Sequence

import numpy as np

from ...core import MediaMismatchError

Grid = tuple[int, int, int]
Span = tuple[int, int]


def pieces_of(
    spans: Sequence[Span], items: Sequence[Grid], tokens: np.ndarray | None, modality: str, where: str
) -> tuple[list[Span], list[Grid]]:
    """Return the runs of a modality, each with a grid.

    A run that ends an item has the rows of all items that end in it (t) and the patches of a row (h, w); one that ends within
    an item has t = 0. So items are told apart where a run ends, and the grids add up to those of the items. Items with rows of
    different sizes in one run are runs of their own.

    Args:
        spans: (start, length) of each run of anchors, ascending.
        items: grid of each item.
        tokens: anchors of each item, integers [n]; None where that is not known.
        modality: how errors name it.
        where: how errors name the sample.

    Raises:
        MediaMismatchError: anchors that are not as many as the items have; both numbers are named.

    Example:
        >>> pieces_of([(0, 4), (9, 8)], [(1, 2, 2)] * 3, np.array([4, 4, 4]), "image", "sample")
        ([(0, 4), (9, 8)], [(1, 2, 2), (2, 2, 2)])
    """
    have = sum(length for _, length in spans)
    if tokens is None and items:
        tokens = np.array([have], np.int64)
    want = 0 if tokens is None else int(tokens.sum())
    if have != want or (items and not have):
        rows = sum(t for t, _, _ in items)
        told = f"there are no {modality} features"
        if items:
            told = f"the sample's {rows} rows of {modality} features have {want or 'at least 1'}"
        raise MediaMismatchError(
            f"{where}: {have} {modality} tokens in {len(spans)} runs, but {told}; where text spells the token, "
            "mm_token_type_ids of 0 say so"
        )
    if tokens is None or not have:
        return [], []
    starts, lengths = np.array(spans, np.int64).T
    run_ends, item_ends, grids = np.cumsum(lengths), np.cumsum(tokens), np.array(items, np.int64)
    differs = np.append((grids[1:, 1:] != grids[:-1, 1:]).any(axis=1), False)
    ends = np.union1d(run_ends, item_ends[differs])
    begins = np.concatenate(([0], ends[:-1]))
    run = np.searchsorted(run_ends, ends)
    found = starts[run] + begins - (run_ends - lengths)[run]
    ended = np.concatenate(([0], np.cumsum(grids[:, 0])))[np.searchsorted(item_ends, ends, side="right")]
    sizes = grids[np.searchsorted(item_ends, ends), 1:]
    grid = np.column_stack((np.diff(ended, prepend=0), sizes)).tolist()
    return list(zip(found.tolist(), (ends - begins).tolist(), strict=True)), [(t, h, w) for t, h, w in grid]
