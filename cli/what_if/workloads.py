"""Length and cost distributions of published training sets: built-in inputs of `evenpack plan` and of the benchmarks.

Each generator returns a `Workload` for R ranks with a given number of samples a rank. Shapes are log-normal fits to
published percentiles; `real` draws from lengths of real documents that ship with the package.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...scheduler.plan import MediaTowers, SampleTable
from ...scheduler.plan.settings import NO_TOWERS

Rng = np.random.Generator
Array = npt.NDArray[Any]
Grid = tuple[int, int, int]
_DATA = Path(__file__).parent / "document_lengths.json"
#: Integer units per token: costs keep three digits of the quadratic term.
_UNIT = 1024
_QUADRATIC_LENGTH = 65_536


class Workload(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A named table of samples, with the capacity that it is meant for and the media towers of its model.

    `grids` has the (t, h, w) patch grids of every sample's media, `None` for text; four patches make a token.
    """

    name: str
    capacity: int
    table: SampleTable
    towers: MediaTowers = NO_TOWERS
    grids: Sequence[Sequence[Grid]] | None = None


def lognormal(rng: Rng, parts: Sequence[tuple[float, float, float]], count: int) -> Array:
    """Draw from a mixture of log-normals, given as (share, mu, sigma)."""
    shares = np.array([share for share, _, _ in parts])
    which = rng.choice(len(parts), size=count, p=shares / shares.sum())
    mu, sigma = np.array([part[1] for part in parts]), np.array([part[2] for part in parts])
    return np.asarray(np.exp(rng.normal(mu[which], sigma[which])))


def text_cost(lengths: Array) -> Array:
    """`l + l^2 / 65,536` in integer units."""
    lengths = lengths.astype(np.int64)
    return np.asarray(lengths * _UNIT + lengths * lengths * _UNIT // _QUADRATIC_LENGTH)


def _text(name: str, capacity: int, lengths: Array, num_ranks: int) -> Workload:
    lengths = np.clip(lengths, 16, capacity).astype(np.int64)
    home = np.arange(len(lengths)) * num_ranks // max(len(lengths), 1)
    table = SampleTable.from_lengths(lengths, cost=text_cost(lengths), home=home, nbytes=16 * lengths + 256)
    return Workload(name=name, capacity=capacity, table=table)


def image_text(rng: Rng, num_ranks: int, per_rank: int, *, phases: int = 1, capacity: int = 16_384) -> Workload:
    """15% text, 55% one image, 20% several, 10% video; patches of 16 pixels, four patches a token.

    Bytes are those of the pixel values in bfloat16 (1,536 values a patch) and of the text.
    """
    count = num_ranks * per_rank
    kind = rng.choice(4, size=count, p=[0.15, 0.55, 0.20, 0.10])
    words = np.where(kind == 0, lognormal(rng, [(1, 5.9, 1.0)], count), lognormal(rng, [(1, 5.0, 0.9)], count))
    tokens, patches = np.clip(words, 8, capacity // 2), np.zeros(count)
    vision = np.zeros(count)
    grids: list[list[Grid]] = [[] for _ in range(count)]
    for i in np.flatnonzero(kind):
        frames, each = _media(rng, int(kind[i]))
        room = (capacity - tokens[i]) * 4 / float((frames * each).sum())
        each = np.maximum(each * min(1.0, room) // 4 * 4, 4)
        patches[i] = (frames * each).sum()
        # Qwen3-VL's tower, in units of a 7B decoder's token.
        vision[i] = (frames * (0.82e9 * each + 1.244e5 * each**2)).sum() / 13.1e9
        grids[i] = [(int(t), 2, int(n) // 2) for t, n in zip(frames, each, strict=True)]
    tokens = np.clip((tokens + patches / 4).astype(np.int64), 8, capacity)
    vision_cost = (vision * _UNIT).astype(np.int64)
    decoder = text_cost(tokens)
    cost = np.stack([vision_cost, decoder], axis=1) if phases == 2 else vision_cost + decoder
    media = np.where(kind == 0, 0, np.where(kind == 3, 2, 1))
    table = SampleTable.from_lengths(
        tokens,
        cost=cost,
        home=np.arange(count) // per_rank,
        media=media if phases == 2 else np.zeros(count, np.int64),
        nbytes=(16 * tokens + 256 + patches * 3072).astype(np.int64),
    )
    towers = MediaTowers(dummy_tokens={"image": 4, "video": 4}) if phases == 2 else NO_TOWERS
    name = "image-text" + (", 2 phases" if phases == 2 else "")
    return Workload(name=name, capacity=capacity, table=table, towers=towers, grids=grids)


def _media(rng: Rng, kind: int) -> tuple[Array, Array]:
    """Frames and patches per frame of the items of one sample."""
    if kind == 1:
        return np.ones(1), np.clip(np.exp(rng.normal(7.9, 0.75, 1)), 256, 65_536)
    if kind == 2:
        items = 1 + rng.geometric(0.35)
        return np.ones(items), np.clip(np.exp(rng.normal(7.2, 0.75, items)), 64, 65_536)
    frames = np.clip(np.exp(rng.normal(3.0, 0.8, 1)), 2, 128).astype(int)
    each = np.clip(np.exp(rng.normal(6.2, 0.4, 1)), 128, 1600)
    return frames, np.minimum(each, 4 * 12_288 / frames)


def _document_lengths() -> Array:
    """Lengths of real documents, in tokens of a Qwen tokenizer, as they are."""
    return np.concatenate([np.array(values) for values in _leaves(json.loads(_DATA.read_text(encoding="utf-8")))])


def real(rng: Rng, num_ranks: int, per_rank: int) -> Workload:
    """Lengths of real documents, in tokens of a Qwen tokenizer."""
    return _text("real documents", 16_384, rng.choice(_document_lengths(), num_ranks * per_rank), num_ranks)


def _leaves(value: Any) -> list[list[int]]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value] if isinstance(value, list) and value and isinstance(value[0], int) else []


def _mixture(name: str, capacity: int, parts: Sequence[tuple[float, float, float]]) -> Callable[[Rng, int, int], Workload]:
    def make(rng: Rng, num_ranks: int, per_rank: int) -> Workload:
        return _text(name, capacity, lognormal(rng, parts, num_ranks * per_rank), num_ranks)

    return make


def _long_align(rng: Rng, num_ranks: int, per_rank: int) -> Workload:
    lengths = np.clip(lognormal(rng, [(1, 9.55, 0.55)], num_ranks * per_rank), 8192, 65_536)
    return _text("long align", 65_536, lengths, num_ranks)


#: Name to generator `(rng, num_ranks, samples per rank) -> Workload`.
WORKLOADS: dict[str, Callable[[Rng, int, int], Workload]] = {
    "sft": _mixture("sft", 16_384, [(0.9998, 5.68, 1.076), (0.0002, 11.70, 0.93)]),
    "bimodal": _mixture("bimodal", 32_768, [(0.317, 6.54, 0.786), (0.683, 9.40, 0.347)]),
    "long tail": _mixture("long tail", 16_384, [(0.975, 5.79, 0.80), (0.025, 8.92, 0.80)]),
    "long align": _long_align,
    "agent": _mixture("agent", 65_536, [(1.0, 10.35, 0.50)]),
    "rl": _mixture("rl", 32_768, [(1.0, 8.2, 0.9)]),
    "image-text": image_text,
    "real documents": real,
}
