"""Families with ordinary positions: packs equal samples alone, and samples that do not add up are refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.families.compare import WithoutCasts, differences, samples_for
from benchmarks.families.tiny import FAMILIES, random_sample, tiny_config
from evenpack.collate import pack_samples, prepare_sample
from evenpack.collate.samples.truncate import truncate_sample
from evenpack.core import Field, FieldSet, MediaMismatchError
from evenpack.models import Family, ModelAdapter, adapter_for, dummy_sample, register_family
from evenpack.models.adapter import TEXT_FIELDS, Anchors
from evenpack.models.families.generic import GENERIC
from evenpack.models.families.refused import REFUSED
from evenpack.models.layout.anyres import anyres_grid
from evenpack.models.registry import FAMILIES as REGISTERED

transformers = pytest.importorskip("transformers")
#: Read off the config of each family in the table that a tiny model is built for.
ADAPTERS = {name: adapter_for(tiny_config(name)) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_equals_its_samples_alone(family):
    """Text, one image, two of other sizes, a spelled media token and a dummy; some models cast a part to single precision."""
    logits, gradient = differences(family)
    assert gradient <= 1e-6
    if max(logits * 1e2, gradient) > 1e-10:
        with WithoutCasts():
            logits, gradient = differences(family)
    assert logits <= 1e-12 and gradient <= 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_checked_against_their_own_rows(family):
    """A token less here and one more there would cancel in the pack, where a model only compares the sums."""
    adapter = ADAPTERS[family]
    _, one, two, *_ = samples_for(adapter)
    (modality,) = adapter.media_tokens
    at = int((one["mm_token_type_ids"] > 0).nonzero()[0])

    def edited(raw: dict[str, Any], places: list[int]) -> dict[str, Any]:
        length = len(raw["input_ids"])
        return {name: value[places] if value.shape == (length,) else value for name, value in raw.items()}

    short = edited(one, [place for place in range(len(one["input_ids"])) if place != at])
    again = int((two["mm_token_type_ids"] > 0).nonzero()[0])
    long = edited(two, sorted([*range(len(two["input_ids"])), again]))
    for pair, wrong in (([short, long], "first"), ([two, long], "second")):
        named = [{**raw, "sample_id": name} for raw, name in zip(pair, ("first", "second"), strict=True)]
        with pytest.raises(MediaMismatchError, match=rf"'{wrong}'.*{modality} tokens in"):
            pack_samples(named, adapter=adapter)
    with pytest.raises(MediaMismatchError, match="mm_token_type_ids of 0 say so"):  # its image got lost
        prepare_sample({"input_ids": one["input_ids"]}, adapter=adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_truncation_leaves_whole_items(family):
    adapter = ADAPTERS[family]
    raw = random_sample(np.random.default_rng(1), adapter, 3)
    sample = prepare_sample(raw, adapter=adapter)
    for length in range(3, sample.num_tokens):
        cut = truncate_sample(sample, length, adapter)
        again = prepare_sample({**cut.values, "mm_token_type_ids": cut.layout.type_ids()}, adapter=adapter)
        assert again.num_tokens <= length and again.layout.runs.tolist() == cut.layout.runs.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_dummies_are_legal_samples(family):
    adapter = ADAPTERS[family]
    (modality,) = adapter.media_tokens
    dummy = dummy_sample(modality, adapter)
    again = prepare_sample({**dummy.values, "mm_token_type_ids": dummy.layout.type_ids()}, adapter=adapter)
    assert again.layout.runs.tolist() == dummy.layout.runs.tolist() and again.grids(modality) == dummy.grids(modality)
    assert float(dummy.tensor(next(f.name for f in adapter.fields if adapter.is_pixels(f))).min()) > 0


def test_every_family_of_the_table_is_compared():
    compared = {tiny_config(name).model_type for name in FAMILIES}
    assert sorted(GENERIC.keys() - compared) == []


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusals_name_the_reason(model_type):
    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.fail(f"{model_type} is no model type")
    with pytest.raises(ValueError, match=REFUSED[model_type][:20]):
        adapter_for(type("Config", (), {"model_type": model_type})())


def test_anyres_equals_the_processors_count():
    """Tiles and tokens of 200 sizes, as LLaVA-NeXT's and OneVision's processors count them."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84], [112, 112]]
    rng = np.random.default_rng(0)
    for cls, most in ((LlavaNextProcessor, 0), (LlavaOnevisionProcessor, 4)):
        processor = cls.__new__(cls)
        processor.image_processor = type("Images", (), {"image_grid_pinpoints": pinpoints})
        processor.patch_size, processor.num_image_tokens, processor.num_additional_image_tokens = 4, 49, 0
        processor.vision_aspect_ratio = f"anyres_max_{most}"
        canvases = tuple(map(tuple, pinpoints))
        rule = Anchors(rule="anyres", field="image_sizes", pinpoints=canvases, tile=28, side=7, max_tiles=most)
        for height, width in rng.integers(5, 400, (200, 2)).tolist():
            want = (
                image_size_to_num_patches((height, width), pinpoints, 28),
                processor._get_number_of_features(height, width, 28, 28),
            )
            assert anyres_grid(height, width, rule) == want


def test_a_family_of_your_own():
    pixels = Field(name="pixel_values", kind="media", dtype="float", shape=(3, 8, 8), modality="image", to_model=True)
    mine = ModelAdapter(
        name="my_llava",
        fields=FieldSet((*TEXT_FIELDS, pixels)),
        media_tokens={"image": 7},
        anchors={"image": Anchors(rule="rows", per_row={"pixel_values": 4}, tower=(2, 2))},
        dummy_grids={"image": (1, 1, 1)},
        trained_modalities=("image",),
    )
    register_family(Family(adapter=mine, model_types=("my_llava",), paths={"media_tokens.image": "image_token_id"}))
    try:
        config = type("Config", (), {"model_type": "my_llava", "image_token_id": 9})()
        adapter = adapter_for(config)
        raw = {"input_ids": [1, 9, 9, 9, 9, 2], "pixel_values": torch.ones(1, 3, 8, 8)}
        assert pack_samples([raw], adapter=adapter).media_token_validity_mask[0].tolist() == [False, *[True] * 4, False]
        assert adapter_for("my_llava") == msgspec.structs.replace(adapter, media_tokens={"image": 7})
    finally:
        REGISTERED.pop("my_llava")
