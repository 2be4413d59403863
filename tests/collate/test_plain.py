"""Plain samples of text, prepared at once, are what they are step by step."""

import msgspec
import numpy as np
import pytest
import torch

from evenpack.collate import prepare_sample
from evenpack.collate.samples import prepare
from evenpack.collate.samples.plain import plain_sample
from evenpack.core import Field, SampleError
from evenpack.models import adapter_for

TEXT = msgspec.structs.replace(adapter_for("text"), pad_token_id=99)
NAN = float("nan")


def raw(real: int = 5, padded: int = 5, **other) -> dict:
    """Return a sample under Megatron-Core's keys; a key whose value is `...` is left out."""
    sample = {
        "tokens": torch.arange(10, 10 + padded),
        "labels": torch.tensor([*range(11, 10 + real), -100, *[7] * (padded - real)]),
        "loss_mask": torch.linspace(0, 1, padded),
        "position_ids": torch.arange(padded),
        "original_seq_len": torch.tensor([real], dtype=torch.int32),
        "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
    }
    return {key: value for key, value in (sample | other).items() if value is not ...}


def own(**other) -> dict:
    sample = {"input_ids": torch.arange(3, 8), "labels": torch.tensor([3, -100, 5, 6, 7]), "loss_weights": torch.rand(5)}
    return {key: value for key, value in (sample | other).items() if value is not ...}


def outcome(prepared, sample):
    """Return everything about the sample that a function makes of a raw one, or the error."""
    try:
        found = prepared(sample, TEXT, "rank 3, sample 'x'")
    except SampleError as error:
        return type(error), str(error)
    values = {name: (str(value.dtype), value.tolist(), value.is_contiguous()) for name, value in found.values.items()}
    layout = (found.layout.runs.shape, found.layout.seconds.shape, found.layout.num_spelled)
    return list(values), values, found.num_tokens, layout, found.shifted, found.sample_id


def whole(sample, adapter, where):
    return prepare_sample(sample, adapter=adapter, where=where)


@pytest.mark.parametrize(
    "sample",
    [
        raw(),
        raw(1, 1),
        raw(3, 8),
        raw(position_ids=...),
        raw(padded_seq_len=..., original_seq_len=5),
        raw(3, 8, padded_seq_len=8, original_seq_len=torch.tensor(3)),
        raw(2, 4, position_ids=torch.tensor([0, 1, 9, 9])),  # of padding
        raw(2, 4, tokens=torch.tensor([3, 4, -1, -1]), loss_mask=torch.tensor([1, 1, NAN, NAN])),
        raw(tokens=torch.arange(10)[::2] + 0),
        own(),
        own(labels=None, loss_weights=None),
        own(labels=..., sample_id="a"),
        own(loss_weights=..., sample_id=7),
        own(input_ids=torch.tensor([5, 99, 99, 99, 5])),
    ],
)
def test_both_ways_agree_on_plain_samples(sample):
    assert plain_sample(sample, TEXT) is not None
    assert outcome(whole, sample) == outcome(prepare._prepared, sample)


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": torch.tensor([1, 2, 3, 4, -5])},
        {"tokens": torch.arange(5, dtype=torch.int32)},
        {"tokens": torch.arange(5)[None]},
        {"tokens": np.arange(5)},
        {"tokens": [1, 2, 3, 4, 5]},
        {"tokens": torch.arange(10)[::2]},
        {"tokens": torch.arange(4)},
        {"tokens": torch.arange(0)},
        {"labels": ...},
        {"labels": torch.arange(6)},
        {"labels": torch.tensor([1, 2, 3, -1, 5])},
        {"labels": None},
        {"loss_mask": ...},
        {"loss_mask": torch.ones(4)},
        {"loss_mask": torch.ones(5, dtype=torch.float64)},
        {"loss_mask": torch.ones(5, requires_grad=True)},
        {"loss_mask": torch.tensor([1, 1, float("inf"), 1, 1])},
        {"loss_mask": torch.tensor([1, NAN, 1, 1, 1])},
        {"loss_mask": torch._neg_view(-torch.ones(5))},
        {"position_ids": torch.tensor([0, 1, 2, 3, 5])},
        {"position_ids": torch.arange(6)},
        {"position_ids": torch.arange(5.0)},
        {"original_seq_len": ...},
        {"original_seq_len": 0},
        {"original_seq_len": 6},
        {"original_seq_len": -5},
        {"original_seq_len": True},
        {"original_seq_len": torch.tensor([5, 5])},
        {"original_seq_len": torch.tensor([5.0])},
        {"original_seq_len": np.int64(5)},
        {"padded_seq_len": 4},
        {"padded_seq_len": None},
        {"sample_id": "a"},
        {"attention_mask": [1, 1, 1, 1, 0]},
        {"input_ids": torch.arange(5)},
        {"reward": 1.0},
    ],
)
def test_anything_else_under_megatron_keys_goes_step_by_step(other):
    agree_step_by_step(raw(**other))


@pytest.mark.parametrize(
    "other",
    [
        {"input_ids": torch.tensor([1, -2, 3, 4, 5])},
        {"input_ids": torch.tensor([99, 99, 3, 4, 5])},
        {"input_ids": torch.tensor([1, 2, 3, 99, 99])},
        {"input_ids": torch.tensor([1, 2, 3, 4, 99]), "labels": torch.tensor([1, 2, 3, 4, 99])},  # learns to end
        {"input_ids": torch.arange(0)},
        {"input_ids": torch.arange(0), "labels": None, "loss_weights": None},
        {"input_ids": [1, 2, 3, 4, 5]},
        {"input_ids": ...},
        {"labels": torch.arange(4)},
        {"labels": torch.tensor([-100, 2, 3, -101, 5])},
        {"labels": torch.arange(5, dtype=torch.int32)},
        {"loss_weights": torch.tensor([1, 1, 1, 1, NAN])},
        {"loss_weights": torch.ones(5)[None]},
        {"sample_id": "\ud800"},
        {"sample_id": "né"},
        {"sample_id": 2**64},
        {"sample_id": True},
        {"sample_id": torch.tensor(4)},
        {"attention_mask": torch.tensor([1, 1, 1, 1, 0])},
        {"tokens": torch.arange(5)},
        {"reward": 1.0},
    ],
)
def test_anything_else_under_our_keys_goes_step_by_step(other):
    agree_step_by_step(own(**other))


def agree_step_by_step(sample):
    assert plain_sample(sample, TEXT) is None
    assert outcome(whole, sample) == outcome(prepare._prepared, sample)


@pytest.mark.parametrize(
    ("field", "is_plain"),
    [
        (Field(name="caption", kind="sample", dtype="text"), True),
        (Field(name="reward", kind="sample", dtype="float32", default=0.5), False),
        (Field(name="advantages", kind="token", dtype="float32", required=True), False),
    ],
)
def test_fields_that_a_sample_must_have_are_not_forgotten(field, is_plain):
    adapter = msgspec.structs.replace(TEXT, fields=TEXT.fields.extended([field]))
    assert (plain_sample(raw(), adapter) is not None) == is_plain


def test_media_families_look_at_every_token():
    assert plain_sample(raw(), adapter_for("qwen2_vl")) is None
