"""Heads of reward models and classifiers give one value per sample, as each sample alone has."""

import copy

import numpy as np
import pytest
import torch

from evenpack.collate import fold_group, pack_samples, prepare_sample
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, prepare_model

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3,
}  # fmt: skip
TEXT = adapter_for("text")


def model_of(name, **more):
    config = transformers.CONFIG_MAPPING[name](**SIZES, **more)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "gpt2", "gpt_neox", "mistral", "phi3"])
def test_a_value_for_every_sample(name):
    stock = model_of(name)
    prepared = prepare_model(copy.deepcopy(stock))
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 64, 12).tolist()
    raws = [{"input_ids": prompt + rng.integers(3, 64, 1 + at).tolist(), "labels": [-100] * (13 + at)} for at in range(4)]
    samples = [prepare_sample(raw, adapter=TEXT) for raw in raws]
    group = fold_group(samples, TEXT)
    assert group.prefix
    want = torch.cat([stock(input_ids=sample.tensor("input_ids")[None]).logits for sample in samples])
    want = torch.cat([want, stock(input_ids=torch.tensor([[5, 6]])).logits])
    for units, align in ((samples, 1), (samples, 8), ([group], 1), ([group], 4)):
        batch = pack_samples([*units, {"input_ids": [5, 6]}, {"input_ids": [7]}], adapter=TEXT, align=align, num_dummies=1)
        logits = prepared(**batch.forward_kwargs(prepared)).logits
        assert logits.shape == (5, 3) and float((logits - want).detach().abs().max()) < 1e-12
    dummy = pack_samples([{"input_ids": [7]}], adapter=TEXT, num_dummies=1)
    prepared(**dummy.forward_kwargs(prepared)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())  # DDP waits for all of them


def test_one_value_for_a_pack_is_refused():
    batch = pack_samples([{"input_ids": [1, 2]}, {"input_ids": [3]}], adapter=TEXT)
    with pytest.raises(
        UnsafeModelError, match=r"Qwen2ForSequenceClassification gives one value per row.*prepare_model\(model\)"
    ):
        batch.forward_kwargs(model_of("qwen2"))
    prepared = prepare_model(model_of("qwen2"))
    arguments = batch.forward_kwargs(prepared)
    with pytest.raises(UnsafeModelError, match="without sample_ends"):
        prepared(**{name: value for name, value in arguments.items() if name != "sample_ends"})
    with pytest.raises(UnsafeModelError, match="its loss takes a value per row"):
        prepared(**arguments, labels=torch.tensor([0, 1]))
    with pytest.raises(UnsafeModelError, match="Only a head called score, on the last token"):
        prepare_model(model_of("bert"))
