"""A prepared model that is called with less than a pack's own arguments, or with its shifted targets as labels."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from evenpack.collate import pack_samples
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler.testing import run_ranks

from .. import tiny

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    torch.manual_seed(0)
    return prepare_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.DENSE)).eval())


def pack(*lengths: int, **settings: Any) -> Any:
    """Return a pack that went to a device, and so is a copy, of texts of these lengths."""
    samples = [{"input_ids": list(range(3, 3 + length))} for length in lengths]
    return pack_samples(samples, adapter=adapter_for("text"), **settings).pin_memory().to("cpu")


def without(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


SHIFTED, LESS = "labels of a pack are shifted already.*step.loss", r"a pack of 2 segments, but without {}: .*forward_kwargs"
#: Arguments from a pack of two samples and from all that `forward_kwargs` gives; what the error says; None: the call is right.
CALLS: list[tuple[Any, str | None]] = [
    (lambda batch, kwargs: kwargs, None),
    (lambda batch, kwargs: kwargs | {"labels": batch.labels}, SHIFTED),
    (lambda batch, kwargs: kwargs | {"labels": batch.shift_labels, "shift_labels": batch.shift_labels}, None),
    (lambda batch, kwargs: kwargs | {"labels": batch.input_ids.clone()}, None),  # not shifted: the caller's own
    (lambda batch, kwargs: {"input_ids": batch.input_ids}, LESS.format("cu_seq_lens_q and position_ids")),
    (lambda batch, kwargs: without(kwargs, "position_ids"), LESS.format("position_ids")),
    (lambda batch, kwargs: without(kwargs, "cu_seq_lens_q"), LESS.format("cu_seq_lens_q")),
    (lambda batch, kwargs: {"input_ids": batch.input_ids, "attention_mask": ~batch.padding_mask}, "a pack of 2 segments"),
    (lambda batch, kwargs: {"input_ids": batch.input_ids, "labels": batch.labels}, SHIFTED),
    (lambda batch, kwargs: {"input_ids": batch.unpack(batch.input_ids)[0][None]}, None),
]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager", dynamic=True)


def with_lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, with_lora, copy.deepcopy, lambda m: prepare_model(m)])
def test_calls(wrap):
    model, batch = wrap(llama()), pack(4, 3)
    for arguments, text in CALLS:
        kwargs = arguments(batch, batch.forward_kwargs(model))
        if text is None:
            model(**kwargs)
            continue
        with pytest.raises(UnsafeModelError, match=text):
            model(**kwargs)


def test_positional_ids():
    with pytest.raises(UnsafeModelError, match="a pack of 2 segments"):
        llama()(pack(4, 3).input_ids)


def test_one_sample_needs_no_boundaries():
    """Its labels are shifted all the same."""
    model, batch = llama(), pack(5)
    expected = model(**batch.forward_kwargs(model)).logits
    torch.testing.assert_close(model(input_ids=batch.input_ids).logits, expected)
    with pytest.raises(UnsafeModelError, match=SHIFTED):
        model(input_ids=batch.input_ids, labels=batch.labels)


def test_unpacked_calls_are_left_alone():
    """Padded batches with labels, and `generate` with its cache, whose ids come from a pack."""
    model, batch = llama(), pack(4, 3)
    ids = torch.randint(1, 300, (2, 6))
    assert model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.isfinite()
    prompt = batch.unpack(batch.input_ids)[0][None]
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] == 7


def test_a_vision_language_model():
    model = prepare_model(tiny.tiny_model("qwen2_5_vl"))
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    batch = pack_samples(samples, adapter=adapter_for(model.config))
    model(**batch.forward_kwargs(model))
    with pytest.raises(UnsafeModelError, match=LESS.format("position_ids")):
        model(**without(batch.forward_kwargs(model), "position_ids"))


def test_compiled_models_run():
    """In one graph per shape; the hook checks nothing while the graph is captured."""
    model, batch = llama(), pack(4, 3)
    kwargs = batch.forward_kwargs(model)
    expected = model(**kwargs).logits
    torch.testing.assert_close(compiled(model)(**kwargs).logits, expected)


def test_under_ddp_and_fsdp2():
    def fn(rank, num_ranks):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (num_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        wrapped = [nn.parallel.DistributedDataParallel(llama()), fully_shard(llama(), mesh=mesh, mp_policy=policy)]
        batch = pack(4, 3)
        for model in wrapped:
            kwargs = batch.forward_kwargs(model)
            model(**kwargs)
            for less in (kwargs | {"labels": batch.labels}, without(kwargs, "position_ids")):
                with pytest.raises(UnsafeModelError):
                    model(**less)
        return True

    assert run_ranks(fn, 2, backend="gloo") == [True] * 2


def test_marked_tensors_are_saved_as_any_other(tmp_path):
    batch = pack(4, 3)
    torch.save({"ids": batch.input_ids, "labels": batch.labels}, tmp_path / "pack.pt")
    assert torch.equal(torch.load(tmp_path / "pack.pt", weights_only=True)["ids"], batch.input_ids)
