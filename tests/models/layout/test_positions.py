"""Positions of whole packs against the installed transformers' own function, sample by sample.

A constant offset per segment is invisible in logits once attention is isolated, so only the integers tell.
"""

import os
from typing import Any

import numpy as np
import pytest

from evenpack.core import SampleLayout
from evenpack.models import ModelAdapter, adapter_for, pack_positions, sample_layout
from evenpack.models.layout.items import media_grids, media_seconds
from evenpack.models.layout.positions import mrope_positions, pack_runs

from ..reference import CLASSES, own_positions, rope_stub
from ..tiny import random_sample

#: Random packs per family; the nightly profile sets 1000.
PACKS = int(os.environ.get("EVENPACK_RANDOM_PACKS", "50"))


def layout_of(raw: dict[str, Any], adapter: ModelAdapter) -> SampleLayout:
    grids, seconds = media_grids(raw, adapter), media_seconds(raw, adapter)
    return sample_layout(raw["input_ids"], grids, seconds, raw["mm_token_type_ids"], adapter=adapter)


def boundaries(lengths: list[int], align: int, pack_align: int) -> np.ndarray:
    """Return padded boundaries, a tail included where the row needs one."""
    ends = np.cumsum([-(-length // align) * align for length in lengths]).tolist()
    total = -(-ends[-1] // pack_align) * pack_align
    return np.array([0, *ends, *([total] if total > ends[-1] else [])])


def differing(positions: np.ndarray, raws: list[dict[str, Any]], cu: np.ndarray, adapter: ModelAdapter, stub: Any) -> int:
    """Count values of a pack's positions that are not what each sample alone, followed by text, has."""
    count = 0
    for s, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        if s < len(raws):
            want = own_positions(stub, raws[s], adapter, more=stop - start - len(raws[s]["input_ids"]))
        else:
            want = np.broadcast_to(np.arange(stop - start), (3, stop - start))
        count += int((positions[:, start:stop] != want).sum())
    return count


def random_pack(seed: int, adapter: ModelAdapter) -> tuple[list[dict[str, Any]], np.ndarray]:
    rng = np.random.default_rng(seed)
    raws = [random_sample(rng, adapter, sides=6) for _ in range(int(rng.integers(1, 6)))]
    align = int(rng.choice([1, 2, 8]))
    return raws, boundaries([len(raw["input_ids"]) for raw in raws], align, align * int(rng.choice([1, 16])))


@pytest.mark.parametrize("family", CLASSES)
def test_equal_to_transformers_per_sample(family):
    pytest.importorskip("transformers")
    adapter = adapter_for(family)
    stub = rope_stub(adapter)
    for seed in range(PACKS):
        raws, cu = random_pack(seed, adapter)
        positions = pack_positions([layout_of(raw, adapter) for raw in raws], cu, adapter)
        assert positions.dtype == adapter.position_dtype
        assert differing(positions, raws, cu, adapter, stub) == 0, seed


@pytest.mark.parametrize("family", CLASSES)
def test_layout_derived_without_types_is_the_same(family):
    adapter = adapter_for(family)
    for seed in range(20):
        raw = random_sample(np.random.default_rng(seed), adapter)
        explicit = layout_of(raw, adapter)
        derived = layout_of(raw | {"mm_token_type_ids": None}, adapter)
        assert np.array_equal(explicit.runs, derived.runs) and np.array_equal(explicit.seconds, derived.seconds)
        assert np.array_equal(explicit.type_ids(), raw["mm_token_type_ids"].numpy())


class TestPlantedErrors:
    """Each of these trains a worse model without a word; each must be seen on the integers."""

    ADAPTER = adapter_for("qwen2_5_vl")

    def planted(self, plant) -> int:
        raws, cu = random_pack(3, self.ADAPTER)
        layouts = [layout_of(raw, self.ADAPTER) for raw in raws]
        assert len(raws) > 1 and sum(len(layout.runs) > 1 for layout in layouts)
        return differing(plant(layouts, cu), raws, cu, self.ADAPTER, rope_stub(self.ADAPTER))

    def test_the_check_passes_without_one(self):
        assert self.planted(lambda layouts, cu: pack_positions(layouts, cu, self.ADAPTER)) == 0

    def test_whole_row_positions(self):
        def whole_row(layouts, cu):
            runs, seconds = pack_runs(layouts, cu)
            return mrope_positions(runs, seconds, cu[[0, -1]], cu[-1:], self.ADAPTER)

        assert self.planted(whole_row) > 0

    def test_swapped_grids(self):
        def swapped(layouts, cu):
            for layout in layouts:
                layout.runs[:, [4, 5]] = layout.runs[:, [5, 4]]
            return pack_positions(layouts, cu, self.ADAPTER)

        assert self.planted(swapped) > 0

    def test_seconds_of_another_video(self):
        def shifted(layouts, cu):
            for layout in layouts:
                layout.seconds[layout.seconds > 0] += np.float32(0.5)
            return pack_positions(layouts, cu, self.ADAPTER)

        assert self.planted(shifted) > 0


def test_one_image_and_one_text():
    """M1: t counts on over the image's larger side, h and w over its rows and columns; the text counts from 0 again."""
    adapter = adapter_for("qwen2_vl")
    ids = [1, 151652, *[151655] * 4, 151653, 2]
    image = sample_layout(ids, {"image": [(1, 4, 4)]}, adapter=adapter)
    positions = pack_positions([image, SampleLayout.text(3)], np.array([0, 8, 11]), adapter)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 0, 1, 2],
        [0, 1, 2, 2, 3, 3, 4, 5, 0, 1, 2],
        [0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 2],
    ]


def test_padding_moves_no_position():
    """M6: a context-parallel layout gives each segment the positions it has without padding, and padding goes on from them."""
    adapter = adapter_for("qwen2_vl")
    image = sample_layout([151652, *[151655] * 6, 151653], {"image": [(1, 4, 6)]}, adapter=adapter)
    dense = pack_positions([image, SampleLayout.text(2)], np.array([0, 8, 10]), adapter)
    padded = pack_positions([image, SampleLayout.text(2)], np.array([0, 12, 16, 20]), adapter)
    assert np.array_equal(padded[:, :8], dense[:, :8]) and np.array_equal(padded[:, 12:14], dense[:, 8:])
    assert padded[:, 7:12].tolist() == [[4, 5, 6, 7, 8]] * 3 and padded[:, 14:].tolist() == [[2, 3, 0, 1, 2, 3]] * 3


@pytest.mark.parametrize("cu", [[0, 0, 3, 3, 5], [0, 3, 5, 5, 5]])
def test_empty_segments_and_repeated_boundaries(cu):
    layouts = [SampleLayout.text(n) for n in np.diff(cu)]
    assert pack_positions(layouts, np.array(cu), adapter_for("qwen2_vl"))[0].tolist() == [0, 1, 2, 0, 1]
    assert pack_positions(layouts, np.array(cu), adapter_for("text")).tolist() == [[0, 1, 2, 0, 1]]


def test_float_positions_of_fractional_seconds():
    """A second frame 1.1 seconds on lies at 14.3 (13 positions a second); the text goes on one beyond the largest."""
    adapter = adapter_for("qwen3_omni_moe")
    ids = [151652, 151656, 151656, 151653, 7]
    layout = sample_layout(ids, {"video": [(2, 2, 2)]}, [1.1], adapter=adapter)
    positions = pack_positions([layout], np.array([0, 5]), adapter)
    assert positions.dtype == np.float32
    assert positions[0] == pytest.approx([0, 1, 15.3, 16.3, 17.3], abs=1e-5)
