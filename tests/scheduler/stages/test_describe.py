"""What a row says about its sample, field by field."""

import re

import pytest
import torch

from evenpack.collate import prepare_sample
from evenpack.core import OversizeSampleError
from evenpack.models import adapter_for
from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.scheduler import default_cost
from evenpack.scheduler.stages.describe import Describer

START, END, IMAGE = 151652, 151653, 151655
IMAGES = {
    "input_ids": [5, START, *[IMAGE] * 4, END, 6, START, *[IMAGE] * 4, END],
    "image_grid_thw": [[1, 4, 4], [1, 4, 4]],
    "pixel_values": torch.zeros(32, 1176),
    "loss_weights": [0.5] * 14,
}


@pytest.mark.parametrize(
    ("family", "raw", "media"),
    [
        ("text", {"input_ids": [1, 2, 3]}, 0),
        ("text", {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "loss_weights": [0.25, 0.5, 2.0]}, 0),
        ("qwen2_vl", {"input_ids": [1, 2, 3]}, 0),
        ("qwen2_vl", IMAGES, 1),
    ],
)
def test_every_field_of_a_row(family, raw, media):
    adapter = adapter_for(family)
    cost, sample = default_cost(adapter), prepare_sample(raw, adapter=adapter)
    config = SchedulerConfig(max_tokens=64, samples_per_step=1)
    found = Describer(adapter=adapter, cost=cost, config=config, cp_size=1, rank=0)(raw, 0)
    loss_tokens, weight = sample.target_stats()
    assert {name: found.record[name].tolist() for name in found.record.dtype.names} == {
        "tokens": len(raw["input_ids"]),
        "loss_tokens": loss_tokens,
        "media": media,
        "age": 0,
        "list_index": 0,
        "weight": weight,
        "nbytes": found.block.nbytes,
        "id_hash": 0,
        "cost": list(cost.sample_cost(sample.num_tokens, sample.grids("image"))),
    }


class Huge:
    phases = ("decoder",)

    def sample_cost(self, tokens, grids):
        return (2**70,)


def test_a_cost_beyond_64_bits_is_no_other_number():
    config = SchedulerConfig(max_tokens=64, samples_per_step=1)
    describer = Describer(adapter=adapter_for("text"), cost=Huge(), config=config, cp_size=1, rank=0)
    with pytest.raises(OverflowError):
        describer({"input_ids": [1]}, 0)


@pytest.mark.parametrize(
    ("settings", "cp_size", "length", "text"),
    [
        ({"max_tokens": 60}, 1, 61, "61 tokens (61 padded) exceed the capacity of 60 padded tokens a pack; raise max_tokens"),
        (
            {"max_tokens": 63, "align": 4}, 1, 61,
            "61 tokens (64 padded) exceed the capacity of 60 padded tokens a pack (max_tokens=63, in multiples of 4); raise",
        ),
        (
            {"max_tokens": 33}, 2, 66,
            "(68 padded) exceed the capacity of 64 padded tokens a pack (max_tokens=33 on each of 2 ranks, in multiples of 4)",
        ),
    ],
)  # fmt: skip
def test_a_sample_that_is_too_long_is_told_the_capacity_and_why(settings, cp_size, length, text):
    config = SchedulerConfig(samples_per_step=1, **settings)
    adapter = adapter_for("text")
    describer = Describer(adapter=adapter, cost=default_cost(adapter), config=config, cp_size=cp_size, rank=0)
    with pytest.raises(OversizeSampleError, match=re.escape(text)):
        describer({"input_ids": list(range(length))}, 0)
