"""Videos whose sound track stands between their frames, as Omni families write them."""

from collections.abc import Mapping, Sequence

from ...core import MediaMismatchError
from ..adapter import ModelAdapter

Grid = tuple[int, int, int]
Span = tuple[int, int]


def has_sound_track(spans: Mapping[str, Sequence[Span]], items: Mapping[str, Sequence[Grid]]) -> bool:
    """Whether a span of frames touches a span of sound: between items of their own there are always markers."""
    if not (items.get("video") and items.get("audio")):
        return False
    edges = {name: {edge for start, length in spans[name] for edge in (start, start + length)} for name in ("video", "audio")}
    return bool(edges["video"] & edges["audio"])


def _blocks_of(spans: Mapping[str, Sequence[Span]]) -> list[dict[str, list[int]]]:
    """Group spans of frames and sound that touch; each block maps a modality to its spans' lengths, in order."""
    ordered = sorted((start, length, name) for name in ("video", "audio") for start, length in spans.get(name, ()))
    blocks: list[dict[str, list[int]]] = []
    end = -1
    for start, length, name in ordered:
        if start != end:
            blocks.append({})
        blocks[-1].setdefault(name, []).append(length)
        end = start + length
    return blocks


def interleaved_grids(
    spans: Mapping[str, Sequence[Span]], items: Mapping[str, Sequence[Grid]], adapter: ModelAdapter, where: str
) -> dict[str, list[Grid]]:
    """Return the grid of each span of frames and of sound: the item's grid at its last span, and t = 0 before.

    So the runs of an item are always those whose frames add up to the frames of its grid.

    Raises:
        MediaMismatchError: a block whose tokens are not those of the next item, or items left over, with both counts.
    """
    left = {name: list(items.get(name, ())) for name in ("video", "audio")}
    grids: dict[str, list[Grid]] = {"video": [], "audio": []}
    for block in _blocks_of(spans):
        for name, lengths in block.items():
            grid = left[name].pop(0) if left[name] else None
            want = 0 if grid is None else adapter.token_count(name, grid)
            if grid is None or sum(lengths) != want:
                raise MediaMismatchError(
                    f"{where}: {sum(lengths)} {name} tokens of a video with sound in {len(lengths)} runs, "
                    f"but the next {name} item has {want} features"
                )
            grids[name] += [*[(0, grid[1], grid[2])] * (len(lengths) - 1), grid]
    for name, rest in left.items():
        if rest:
            raise MediaMismatchError(f"{where}: {len(rest)} {name} items have no tokens: {rest[:8]}")
    return grids
