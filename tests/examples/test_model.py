"""The demo's models: small, the real classes, equal on every rank, and known to evenpack."""

import pytest
import torch
from demo.model import build_model, count_parameters
from demo.processing import encode
from demo.tokenizer import IMAGE_TOKEN

from evenpack.collate import pack_samples
from evenpack.models import adapter_for, prepare_model


@pytest.fixture(scope="module")
def model(family, tokenizer):
    return build_model(family, tokenizer, seed=0)


def test_size(model):
    assert 1_000_000 <= count_parameters(model) <= 2_000_000


def test_weights_depend_on_the_seed_only(model, family, tokenizer):
    same, other = build_model(family, tokenizer, seed=0), build_model(family, tokenizer, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(model.parameters()), next(other.parameters()))


def test_unknown_family(tokenizer):
    with pytest.raises(ValueError, match="one of qwen2_5_vl, qwen3_vl, got 'gpt2'"):
        build_model("gpt2", tokenizer, seed=0)


def test_the_adapter_reads_the_configuration(model, family, tokenizer):
    adapter = adapter_for(model.config)
    assert adapter.name == family
    assert adapter.media_tokens["image"] == tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    assert adapter.patch_dim == model.config.vision_config.patch_size**2 * 3 * 2


def test_a_pack_equals_its_samples_alone(family, tokenizer, processor, examples):
    samples = [encode(processor, examples[index]) for index in range(8)]
    alone = build_model(family, tokenizer, seed=0).eval()
    packed = prepare_model(build_model(family, tokenizer, seed=0)).eval()
    batch = pack_samples(samples, adapter=adapter_for(packed.config))
    with torch.no_grad():
        together = batch.unpack(packed(**batch.forward_kwargs(packed)).logits)
        for sample, logits in zip(samples, together, strict=True):
            inputs = {name: value for name, value in sample.items() if name in ("pixel_values", "image_grid_thw")}
            row = {name: sample[name][None] for name in ("input_ids", "mm_token_type_ids")}
            expected = alone(**row, **inputs, use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
