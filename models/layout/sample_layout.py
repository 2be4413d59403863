"""From token ids and grids to a sample's layout, refusing whatever does not agree."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core import TYPE_CODES, AmbiguousMediaError, MediaMismatchError, SampleLayout
from ..adapter import ModelAdapter
from .interleaved import has_sound_track, interleaved_grids
from .pieces import pieces_of
from .placeholders import refuse_unclaimed

Grid = tuple[int, int, int]


def sample_layout(
    input_ids: Any,
    grids: Mapping[str, Any],
    seconds: Any = None,
    mm_token_type_ids: Any = None,
    *,
    adapter: ModelAdapter,
    counts: Mapping[str, np.ndarray | None] | None = None,
    where: str = "sample",
) -> SampleLayout:
    """Return where a sample's media lie among its tokens.

    With `mm_token_type_ids`, each run of one type must anchor exactly the next item of that modality. Without them, runs of
    a media token are matched to the items by length, in order, and only where there is exactly one way to do it. A run that is
    left over is text that spells the token, unless it stands between the family's markers: there its item got lost.

    Families with `adapter.anchors` write one image in several runs, or several tiles in one, so only the sums are compared.

    Args:
        input_ids: integers [L].
        grids: modality to its items' (t, h, w) in patches, integers [n, 3]; a modality without items may be absent. An
            audio item is (frames, 1, 1). See `items.media_grids`.
        seconds: seconds per temporal patch of each video, floats [n]; None where the sample has none (1 is taken, as
            transformers does).
        mm_token_type_ids: integers [L]: 0 text, 1 image, 2 video, 3 audio; None to derive them.
        adapter: the family.
        counts: modality to the number of tokens that anchor each of its items, integers [n], None where it is not known; for
            modalities in `adapter.anchors` (see `items.media_items`).
        where: how errors name the sample.

    Raises:
        MediaMismatchError: anchors and features that differ in number (both are named), an anchor whose id is not the media
            token, a placeholder between markers that no item claims, or a modality that the family does not have.
        AmbiguousMediaError: runs of the media token that fit the items in no way, or in more than one way.

    Example:
        >>> from evenpack.models import adapter_for
        >>> adapter = adapter_for("qwen2_vl")
        >>> ids = [9, 151652, *[151655] * 4, 151653]
        >>> sample_layout(ids, {"image": [(1, 4, 4)]}, adapter=adapter).runs
        array([[2, 4, 1, 1, 4, 4]])
    """
    ids = np.asarray(input_ids)
    items = {name: _item_grids(grids.get(name), name, adapter, where) for name in (*adapter.media_tokens, *grids)}
    types = None if mm_token_type_ids is None else np.asarray(mm_token_type_ids)
    masks = _anchor_masks(ids, adapter) if types is None else _typed_masks(ids, types, adapter, where)
    spans = {name: _spans_of(mask) for name, mask in masks.items()}
    parts = {name: _run_grids(name, items[name], adapter) for name in masks}
    together = interleaved_grids(spans, items, adapter, where) if has_sound_track(spans, items) else {}
    choose = _derived_spans if types is None else _checked_spans
    for name, found in spans.items():
        if name in adapter.anchors:
            spans[name], parts[name] = pieces_of(found, parts[name], (counts or {}).get(name), name, where)
        elif name not in together:
            spans[name] = choose(found, name, items[name], adapter, where)
    parts |= together
    runs = [
        (start, length, TYPE_CODES[name], *grid)
        for name, found in spans.items()
        for (start, length), grid in zip(found, parts[name], strict=True)
    ]
    paces = _run_seconds(parts, len(items.get("video", ())), seconds, adapter, where)
    order = sorted(range(len(runs)), key=runs.__getitem__)
    table = np.array([runs[k] for k in order], np.int64).reshape(-1, 6)
    free = np.isin(ids, list(adapter.media_tokens.values()))
    for start, length in table[:, :2].tolist():
        free[start : start + length] = False
    num_spelled = int(np.count_nonzero(free))
    if num_spelled and types is None:
        refuse_unclaimed(_spans_of(free), ids, masks, {name: len(grid) for name, grid in items.items()}, adapter, where)
    return SampleLayout(
        num_tokens=len(ids), runs=table, seconds=np.array([paces[k] for k in order], np.float32), num_spelled=num_spelled
    )


def _item_grids(grid: Any, modality: str, adapter: ModelAdapter, where: str) -> list[Grid]:
    """Return a modality's grids as tuples, checked against the family."""
    items = [] if grid is None else [(t, h, w) for t, h, w in np.asarray(grid, np.int64).reshape(-1, 3).tolist()]
    if items and modality not in adapter.media_tokens:
        raise MediaMismatchError(f"{where}: {len(items)} {modality} items, but {adapter.name} has no {modality}")
    side = 1 if modality == "audio" or modality in adapter.anchors else adapter.merge_size
    steps = (adapter.temporal_merge if modality == "video" else 1, side, side)
    for grid in items:
        if min(grid) < 1 or any(size % step for size, step in zip(grid, steps, strict=True)):
            raise MediaMismatchError(f"{where}: {modality} grid {grid}: t, h, w must be positive multiples of {steps}")
    return items


def _run_grids(modality: str, items: Sequence[Grid], adapter: ModelAdapter) -> list[Grid]:
    """Return the grid of each run: one per item, or one per frame of a video where a timestamp parts its frames."""
    if modality == "video" and adapter.rope == "timestamp":
        return [(1, h, w) for t, h, w in items for _ in range(t)]
    return list(items)


def _run_lengths(modality: str, items: Sequence[Grid], adapter: ModelAdapter) -> list[int]:
    """Return how many tokens each run has."""
    return [adapter.token_count(modality, grid) for grid in _run_grids(modality, items, adapter)]


def _run_seconds(
    parts: Mapping[str, list[Grid]], num_videos: int, seconds: Any, adapter: ModelAdapter, where: str
) -> list[float]:
    """Return the seconds per temporal patch of each run, in the order of the modalities; 0 where there is no such value."""
    paces: list[float] = []
    for name in adapter.media_tokens:
        if name != "video" or not adapter.has_seconds:
            paces += [0.0] * len(parts[name])
        elif seconds is None:
            paces += [1.0] * len(parts[name])
        elif len(seconds) != num_videos:
            raise MediaMismatchError(f"{where}: {len(seconds)} values of seconds per grid for {num_videos} videos")
        else:
            done = np.cumsum([0, *(t > 0 for t, _, _ in parts[name])])  # videos that end before each run
            paces += np.asarray(seconds, np.float32)[done[:-1]].tolist()
    return paces


def _spans_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, length) of each run of True.

    Example:
        >>> _spans_of(np.array([True, False, True, True]))
        [(0, 1), (2, 2)]
    """
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [(start, stop - start) for start, stop in edges.tolist()]


def _typed_masks(ids: np.ndarray, types: np.ndarray, adapter: ModelAdapter, where: str) -> dict[str, np.ndarray]:
    """Return where explicit type ids say that each modality's anchors stand, bool [L], checked against the ids."""
    if types.shape != ids.shape:
        raise MediaMismatchError(f"{where}: {len(types)} mm_token_type_ids for {len(ids)} input_ids")
    codes = {TYPE_CODES[name]: name for name in adapter.media_tokens}
    masks = {name: types == code for code, name in codes.items()}
    if np.count_nonzero(types) != sum(np.count_nonzero(mask) for mask in masks.values()):
        unknown = sorted(set(types.tolist()) - {0, *codes})
        raise MediaMismatchError(f"{where}: mm_token_type_ids {unknown}; {adapter.name} knows {sorted({0, *codes})}")
    for name, mask in masks.items():
        if name in adapter.anchors:  # many processors type the tokens around an item too
            mask &= ids == adapter.media_tokens[name]
        wrong = np.flatnonzero(mask & (ids != adapter.media_tokens[name]))
        if len(wrong):
            at = int(wrong[0])
            raise MediaMismatchError(
                f"{where}: token {at} is typed as {name} but its id is {ids[at]}, not {adapter.media_tokens[name]}"
            )
    return masks


def _anchor_masks(ids: np.ndarray, adapter: ModelAdapter) -> dict[str, np.ndarray]:
    """Return where each modality's media token stands, bool [L]; a token that images and videos share is split by markers."""
    masks = {name: ids == token for name, token in adapter.media_tokens.items()}
    if adapter.shares_token:
        in_video = np.cumsum(ids == adapter.video_start) > np.cumsum(ids == adapter.video_end)
        masks["image"], masks["video"] = masks["image"] & ~in_video, masks["video"] & in_video
    return masks


def _checked_spans(
    spans: list[tuple[int, int]], modality: str, items: Sequence[Grid], adapter: ModelAdapter, where: str
) -> list[tuple[int, int]]:
    """Return the runs of a modality that explicit type ids name, if they are the items' runs."""
    have, want = [length for _, length in spans], _run_lengths(modality, items, adapter)
    if have != want and adapter.rope == "1d":
        spans = _cut(spans, want)
        have = [length for _, length in spans]
    if have != want:
        raise MediaMismatchError(_disagreement(modality, have, want, where))
    return spans


def _cut(spans: list[tuple[int, int]], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs cut at the ends of items that stand side by side, which ordinary positions need not tell apart.

    Example:
        >>> _cut([(0, 4), (9, 6)], [4, 2, 4])
        [(0, 4), (9, 2), (11, 4)]
    """
    ends = set(np.cumsum(lengths).tolist())
    found, done = [], 0
    for start, length in spans:
        cuts = [0, *(at - done for at in sorted(ends) if done < at < done + length), length]
        found += [(start + begin, end - begin) for begin, end in itertools.pairwise(cuts)]
        done += length
    return found


def _derived_spans(
    spans: list[tuple[int, int]], modality: str, items: Sequence[Grid], adapter: ModelAdapter, where: str
) -> list[tuple[int, int]]:
    """Return the runs of a media token that anchor the items, where there is exactly one way to choose them."""
    have, want = [length for _, length in spans], _run_lengths(modality, items, adapter)
    if not want:
        return []  # whatever stands here anchors nothing
    if have == want:
        return spans
    if sum(have) < sum(want):
        raise MediaMismatchError(_disagreement(modality, have, want, where))
    chosen = unique_choice(have, want)
    if chosen is None:
        raise AmbiguousMediaError(
            f"{_disagreement(modality, have, want, where)}; they do not match in exactly one way, "
            "and only mm_token_type_ids can tell which tokens are text"
        )
    return [spans[k] for k in chosen]


def unique_choice(have: Sequence[int], want: Sequence[int]) -> list[int] | None:
    """Return the indices of the subsequence of `have` that equals `want`, or None where there is none or more than one.

    The leftmost and the rightmost greedy match bound all others, so the match is unique exactly where the two agree.

    Example:
        >>> unique_choice([1, 4, 1], [4]), unique_choice([4, 4], [4])
        ([1], None)
    """
    left = _greedy_match(have, want)
    right = _greedy_match(have[::-1], want[::-1])
    if left is None or right is None or left != [len(have) - 1 - k for k in reversed(right)]:
        return None
    return left


def _greedy_match(have: Sequence[int], want: Sequence[int]) -> list[int] | None:
    """Return the indices of the leftmost subsequence of `have` that equals `want`, or None."""
    chosen: list[int] = []
    for k, length in enumerate(have):
        if len(chosen) < len(want) and length == want[len(chosen)]:
            chosen.append(k)
    return chosen if len(chosen) == len(want) else None


def _disagreement(modality: str, have: Sequence[int], want: Sequence[int], where: str) -> str:
    """Say how anchors and features differ, with both counts."""
    return (
        f"{where}: {sum(have)} {modality} tokens in {len(have)} runs {_brief(have)}, "
        f"but the grids have {sum(want)} features in {len(want)} runs {_brief(want)}"
    )


def _brief(lengths: Sequence[int]) -> str:
    """Write a list of lengths, cut after eight."""
    return str(list(lengths)) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, ...]"
