"""Positions of packs, on integers: a constant offset per segment changes no logit, but it is wrong all the same."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evenpack.collate import pack_samples
from evenpack.models import adapter_for

PACKS = int(os.environ.get("EVENPACK_RANDOM_PACKS", "60"))
FAMILIES = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
}


@pytest.fixture(scope="module")
def rope_index():
    """The installed transformers' own function of a family, for one sample; it needs no weights."""
    pytest.importorskip("transformers")
    import importlib

    def build(family: str):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        cls = getattr(module, FAMILIES[family])
        vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
        stub = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        stub.get_vision_position_ids = cls.get_vision_position_ids.__get__(stub)

        def positions(sample) -> torch.Tensor:
            grids = {name: sample.values.get(name) for name in ("image_grid_thw", "video_grid_thw")}
            if family == "qwen2_5_vl":
                grids["second_per_grid_ts"] = sample.values.get("second_per_grid_ts")
            types = torch.from_numpy(sample.layout.type_ids())[None]
            return cls.get_rope_index(stub, sample.tensor("input_ids")[None], types, **grids)[0][:, 0]

        return positions

    return build


def differing(batch, samples, positions) -> int:
    """Count slots of a pack whose position is not what the sample alone has, or, in padding, what more text would have."""
    wrong, row = 0, batch.position_ids[:, 0]
    for segment, (start, slots) in enumerate(zip(batch.bounds.cu_padded.tolist(), batch.bounds.padded.tolist(), strict=False)):
        alone = positions(samples[segment]) if segment < len(samples) else torch.zeros(3, 0, dtype=torch.int64)
        last = alone[:, -1:].amax() if alone.shape[1] else torch.tensor(-1)
        padding = last + 1 + torch.arange(slots - alone.shape[1])
        want = torch.cat([alone, padding.expand(3, -1)], dim=1)
        wrong += int((row[:, start : start + slots] != want).sum())
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_equal_transformers_per_sample(make, rope_index, family):
    positions, adapter = rope_index(family), adapter_for(family)
    for seed in range(PACKS):
        rng = np.random.default_rng(seed)
        samples = make.random_samples(family, rng)
        batch = pack_samples(samples, adapter=adapter, align=int(rng.choice([1, 4, 8])), pack_align=8)
        assert differing(batch, samples, positions) == 0, seed


def test_text_positions_count_from_0_in_every_segment():
    batch = pack_samples([{"input_ids": [1] * 3}, {"input_ids": [1] * 5}], adapter=adapter_for("text"), align=4, pack_align=16)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]


def m1_pack(make, **settings):
    ids = [5, make.START, *[make.IMAGE] * 4, make.END, 6]
    image = {"input_ids": ids, "image_grid_thw": [[1, 4, 4]], "pixel_values": torch.zeros(16, 1176)}
    return pack_samples([image, {"input_ids": [5, 6, 7]}], adapter=adapter_for("qwen2_vl"), **settings)


def test_m1_an_image_and_a_text(make):
    assert m1_pack(make).position_ids[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 0, 1, 2],
        [0, 1, 2, 2, 3, 3, 4, 5, 0, 1, 2],
        [0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 2],
    ]


def test_m6_padding_continues_positions_and_moves_none(make):
    plain, padded = m1_pack(make), m1_pack(make, align=6, pack_align=36)
    for alone, same in zip(plain.unpack(plain.position_ids), padded.unpack(padded.position_ids), strict=True):
        assert torch.equal(alone, same)
    assert padded.position_ids[:, 0, 8:12].tolist() == [[6, 7, 8, 9]] * 3
    assert padded.position_ids[:, 0, 15:18].tolist() == [[3, 4, 5]] * 3
    assert padded.position_ids[:, 0, 18:].tolist() == [list(range(18))] * 3


class TestPlantedErrors:
    """Each of these trains silently; each is seen on the integers."""

    def check(self, make, rope_index, plant) -> int:
        rng = np.random.default_rng(5)
        samples = make.random_samples("qwen2_5_vl", rng, 4)
        return differing(plant(samples), samples, rope_index("qwen2_5_vl"))

    def test_whole_row_positions(self, make, rope_index):
        def whole_row(samples):
            batch = pack_samples(samples, adapter=adapter_for("qwen2_5_vl"))
            first = batch.bounds.cu_padded[1]
            batch.position_ids[:, :, first:] += int(batch.position_ids[:, :, :first].max()) + 1
            return batch

        assert self.check(make, rope_index, whole_row) > 0

    def test_swapped_grids(self, make, rope_index):
        """Two items of one size trade their grids: (4, 6) and (6, 4) have as many tokens."""
        raw = make.raw("qwen2_5_vl", [1, ("image", 1, 4, 6), 1, ("image", 1, 6, 4), 1])
        swapped = raw | {"image_grid_thw": raw["image_grid_thw"].flip(0)}
        one, other = (pack_samples([sample], adapter=adapter_for("qwen2_5_vl")) for sample in (raw, swapped))
        assert not torch.equal(one.position_ids, other.position_ids)

    def test_positions_shifted_by_one(self, make, rope_index):
        def shifted(samples):
            batch = pack_samples(samples, adapter=adapter_for("qwen2_5_vl"))
            batch.position_ids.copy_(batch.position_ids.roll(1, dims=-1))
            return batch

        assert self.check(make, rope_index, shifted) > 0
