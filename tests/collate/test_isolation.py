"""The probe: samples that real processors make, packed, against the stock model on each alone, and faults that it must see."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from benchmarks.families import tiny as families
from benchmarks.families.processors import PROCESSORS, fitting_config
from evenpack.collate import isolation, pack_samples, verify_isolation
from evenpack.core import FieldSet, SampleError, UnsafeModelError
from evenpack.models import ModelAdapter, adapter_for, prepare_model
from evenpack.models.attention import varlen

from ..models import tiny as mrope
from .encoding import tiny as qwen

FAMILIES = ("qwen2_5_vl", *PROCESSORS)


def built(family: str, dtype: torch.dtype = torch.float64) -> tuple[Any, ModelAdapter, Any]:
    """Return a tiny prepared model, its adapter and a real processor of its family."""
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        processor, ids = qwen.processor(), qwen.adapter()
        name, settings = mrope.FAMILIES[family]()
        tokens = {"image_token_id": ids.media_tokens["image"], "video_token_id": ids.media_tokens["video"]}
        markers = {"vision_start_token_id": ids.vision_start, "vision_end_token_id": ids.vision_end}
        settings = settings | tokens | markers
        settings["vision_config"] = settings["vision_config"] | {"patch_size": 14, "window_size": 56}
        config = getattr(transformers, f"{name}Config")(**settings)
    else:
        processor = PROCESSORS[family][0]()
        config = fitting_config(family, processor)
        name = families.FAMILIES[family][0]
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    adapter = adapter_for(model.config)
    return prepare_model(model), adapter, processor


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_that_a_processor_makes_are_exact(family):
    model, adapter, processor = built(family)
    model.train()
    assert verify_isolation(model, adapter, processor=processor) <= 1e-6, "rotary tables and norms are of fp32"
    assert model.training and model.config.get_text_config()._attn_implementation == "evenpack_varlen"


def without_blocks(model: Any, adapter: ModelAdapter, processor: Any, monkeypatch: Any) -> Any:
    """A mask is dropped: the adapter does not say that image tokens see each other."""
    return model, msgspec.structs.replace(adapter, bidirectional=None), processor


def without_window(model: Any, adapter: ModelAdapter, processor: Any, monkeypatch: Any) -> Any:
    """A layer forgets its window, which stock attention has in its mask."""
    model.get_decoder().layers[0].self_attn.sliding_window = None
    return model, adapter, processor


def one_row(model: Any, adapter: ModelAdapter, processor: Any, monkeypatch: Any) -> Any:
    """Boundaries of the whole row: a leak between the samples."""
    monkeypatch.setattr(varlen, "lengths_of", lambda boundaries: [int(boundaries[-1])])
    return model, adapter, processor


def wrong_axis(model: Any, adapter: ModelAdapter, processor: Any, monkeypatch: Any) -> Any:
    """Rows lie along another axis than the adapter says."""
    changed = [msgspec.structs.replace(f, axis=0, shape=None) if f.name == "pixel_values" else f for f in adapter.fields]
    return model, msgspec.structs.replace(adapter, fields=FieldSet(tuple(changed))), processor


def other_features(model: Any, adapter: ModelAdapter, processor: Any, monkeypatch: Any) -> Any:
    """Rows of the pack's images in another order: each sample gets features of another one."""

    def shuffled(*args: Any, **settings: Any) -> Any:
        batch = pack_samples(*args, **settings)
        axis = adapter.fields["pixel_values"].axis
        return msgspec.structs.replace(batch, media={**batch.media, "pixel_values": batch.media["pixel_values"].flip(axis)})

    monkeypatch.setattr(isolation, "pack_samples", shuffled)
    return model, adapter, processor


def one_tile_more(model: Any, adapter: ModelAdapter, processor: Any, monkeypatch: Any) -> Any:
    """The processor returns a tile more than it writes tokens for."""
    stock = type(processor.image_processor)

    class More(stock):
        def __call__(self, *args: Any, **settings: Any) -> Any:
            out = super().__call__(*args, **settings)
            for name in ("pixel_values", "pixel_attention_mask"):
                if name in out:
                    pixels = np.asarray(out[name])
                    axis = min(adapter.fields[name].axis, pixels.ndim - 1)
                    out[name] = np.concatenate([pixels, pixels.take([0], axis)], axis)
            return out

    processor.image_processor.__class__ = More
    return model, adapter, processor


@pytest.mark.parametrize(
    ("family", "plant", "said"),
    [
        ("gemma3", without_blocks, r"the sample with one image \(number 1\) differs by .* from decoder layer 0 on"),
        ("paligemma", without_blocks, "leaves it to its mask"),
        ("gemma3", without_window, r"the sample with a text \(number 0\) differs by .* from decoder layer 0 on"),
        ("idefics3", one_row, "mixes the segments of a pack"),
        ("idefics3", wrong_axis, r"sample 1 \(.one image.\).*rows of image features"),
        ("idefics3", other_features, r"the sample with one image \(number 1\) differs by .* from its embeddings \(features"),
        ("llava_next", other_features, r"differs by .* from its embeddings \(features"),
        ("gemma3", other_features, r"differs by .* from its embeddings \(features"),
        ("idefics3", one_tile_more, "sample 1 \\('one image'\\).*image tokens"),
    ],
)
def test_planted_faults_are_named(family, plant, said, monkeypatch):
    model, adapter, processor = plant(*built(family), monkeypatch)
    with pytest.raises((UnsafeModelError, SampleError), match=said):
        verify_isolation(model, adapter, processor=processor)
    assert model.config.get_text_config()._attn_implementation == "evenpack_varlen", "and the model is as it was"


def test_a_tokenizer_alone_makes_no_images():
    model, adapter, processor = built("idefics3")
    with pytest.raises(ValueError, match="makes no images, and idefics3 has them: give the family's processor"):
        verify_isolation(model, adapter, processor=processor.tokenizer)


def test_groups_are_tried_too(monkeypatch):
    """A branch that sees its siblings, or lacks the prefix, is found; so is a model on kernels that cannot be told."""
    model = prepare_model(mrope.tiny_model("qwen3_vl"))
    adapter = adapter_for(model.config)
    assert verify_isolation(model, adapter, groups=True) < 1e-12
    monkeypatch.setattr(varlen, "_seen", lambda key, value, lengths, boundaries, index: (key, value, lengths))
    with pytest.raises(UnsafeModelError, match="member 0 of a group that shares a prefix differs by"):
        verify_isolation(model, adapter, groups=True)
