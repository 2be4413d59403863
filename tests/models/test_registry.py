"""Adapters by name and by config, what they refuse, and the smallest legal samples."""

import math

import pytest
import torch

from evenpack.models import adapter_for, check_config, dummy_sample, dummy_text
from evenpack.models.layout.items import media_grids, media_seconds
from evenpack.models.layout.sample_layout import sample_layout
from evenpack.models.registry import FAMILIES

from . import tiny

VISION = [name for name in FAMILIES if name != "text"]
#: Families whose config class has the released ids as defaults; those of the Omni classes are other ids.
RELEASED_DEFAULTS = [name for name in VISION if "omni" not in name]


@pytest.mark.parametrize("name", FAMILIES)
def test_names_give_the_released_constants(name):
    adapter = adapter_for(name)
    assert adapter.name == name
    assert set(adapter.trained_modalities) == set(adapter.media_tokens) == set(adapter.dummy_grids)
    assert len(set(adapter.media_tokens.values())) == len(adapter.media_tokens) or adapter.shares_token
    pixels = [field for field in adapter.fields if field.rows == "patches"]
    assert all(math.prod(field.shape) == adapter.patch_dim for field in pixels)


@pytest.mark.parametrize("name", RELEASED_DEFAULTS)
def test_default_configs_agree_with_the_released_ids(name):
    """Where a config class has the released ids as defaults, the constants here equal them."""
    transformers = pytest.importorskip("transformers")
    adapter = adapter_for(transformers.AutoConfig.for_model(name))
    ours = adapter_for(name)
    for attribute in ("media_tokens", "vision_start", "vision_end", "video_start", "merge_size", "patch_dim", "fields"):
        assert getattr(adapter, attribute) == getattr(ours, attribute), attribute


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_configs_give_their_own_values(family):
    transformers = pytest.importorskip("transformers")
    name, settings = tiny.FAMILIES[family]()
    adapter = adapter_for(getattr(transformers, f"{name}Config")(**settings))
    assert adapter.name == family
    assert adapter.media_tokens["image"] == 301 and adapter.pad_token_id == 0
    shapes = {"ernie4_5_vl_moe": (48,), "paddleocr_vl": (3, 4, 4)}  # the others' patches span two frames
    assert adapter.fields["pixel_values"].shape == shapes.get(family, (96,))
    check_config(adapter, getattr(transformers, f"{name}Config")(**settings))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt2", "mistral"])
def test_any_decoder_is_text(model_type):
    transformers = pytest.importorskip("transformers")
    adapter = adapter_for(transformers.AutoConfig.for_model(model_type))
    assert (adapter.name, adapter.rope, adapter.trained_modalities) == ("text", "1d", ())


@pytest.mark.parametrize("bad", ["qwen9", 7, None])
def test_unknown_families_are_refused(bad):
    with pytest.raises(ValueError, match=r"qwen2_5_vl|config"):
        adapter_for(bad)


@pytest.mark.parametrize("model_type", ["clip", "t5", "seamless_m4t", "vit"])
def test_other_kinds_of_models_are_refused(model_type):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=rf"{model_type}.*known: text, qwen2_vl"):
        adapter_for(transformers.AutoConfig.for_model(model_type))


def test_trained_modalities():
    assert adapter_for("qwen3_vl", trained_modalities=["image"]).trained_modalities == ("image",)
    assert adapter_for("qwen3_vl", trained_modalities=[]).trained_modalities == ()
    with pytest.raises(ValueError, match="audio"):
        adapter_for("qwen3_vl", trained_modalities=["audio"])


def test_config_with_other_values_is_refused():
    """The class default of `tokens_per_second` is 4, the released checkpoints say 2."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="tokens_per_second is 2 in the adapter, 4 in the config"):
        check_config(adapter_for("qwen2_5_vl"), transformers.Qwen2_5_VLConfig())
    with pytest.raises(ValueError, match=r"'qwen2_vl'.*'qwen2_5_vl'"):
        check_config(adapter_for("qwen2_vl"), transformers.Qwen2_5_VLConfig())
    check_config(adapter_for("qwen2_vl"), transformers.Qwen2VLConfig())
    check_config(adapter_for("qwen2_vl"), object())


@pytest.mark.parametrize(("name", "modality"), [(name, m) for name in VISION for m in adapter_for(name).dummy_grids])
def test_dummies_are_legal_and_learn_nothing(name, modality):
    adapter = adapter_for(name)
    sample = dummy_sample(modality, adapter, torch.bfloat16)
    values = dict(sample.values)
    layout = sample_layout(
        values["input_ids"], media_grids(values, adapter), media_seconds(values, adapter), adapter=adapter, where="dummy"
    )
    assert layout.runs.tolist() == sample.layout.runs.tolist() and layout.seconds.tolist() == sample.layout.seconds.tolist()
    assert layout.num_spelled == 0 and layout.type_ids().tolist() == values["mm_token_type_ids"].tolist()
    assert bool((values["labels"] == -100).all()) and float(values["loss_weights"].sum()) == 0
    assert {field.name for field in adapter.fields.of_kind("media") if field.modality == modality} <= set(values)
    assert all(values[f.name].dtype == torch.bfloat16 for f in adapter.fields if f.rows == "patches" and f.name in values)


def test_dummy_text_has_one_token():
    sample = dummy_text(adapter_for("text"))
    assert sample.num_tokens == 1 and sample.tensor("labels").tolist() == [-100]


def test_dummies_of_an_unknown_modality():
    with pytest.raises(ValueError, match=r"audio.*\['image', 'video'\]"):
        dummy_sample("audio", adapter_for("qwen2_vl"))


@pytest.mark.parametrize(("window", "frames", "tokens"), [(0, 4, 1), (0, 100, 25), (50, 100, 13), (50, 101, 14), (50, 250, 33)])
def test_audio_tokens(window, frames, tokens):
    import msgspec

    adapter = msgspec.structs.replace(adapter_for("qwen3_omni_moe"), audio_window=window)
    assert adapter.token_count("audio", (frames, 1, 1)) == tokens
