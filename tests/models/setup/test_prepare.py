"""Which models are refused, what setting them up changes, and the wrappers that are looked through."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from evenpack.collate import pack_samples
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, check_model, forward_arguments, prepare_model, unwrap_model, verify_isolation
from evenpack.models.attention.recurrent import Isolated
from evenpack.models.setup.forward import VARLEN_ARGUMENTS

from .. import tiny

transformers = pytest.importorskip("transformers")


def llama(implementation: str = "sdpa", **settings: Any) -> Any:
    config = transformers.LlamaConfig(**tiny.DENSE | settings, attn_implementation=implementation)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_that_ignores_boundaries_is_named(implementation):
    with pytest.raises(UnsafeModelError, match=f"LlamaForCausalLM uses attention implementation '{implementation}'"):
        check_model(llama(implementation))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_stock_models_are_refused_and_prepared_ones_pass(family):
    model = tiny.tiny_model(family)
    with pytest.raises(UnsafeModelError, match="sdpa"):
        check_model(model)
    assert prepare_model(model) is model
    check_model(model)
    assert prepare_model(model) is model, "again is fine"


def test_recurrent_layers_over_the_whole_row_are_named():
    model = tiny.tiny_model("qwen3_5")
    prepare_model(model)
    layer = model.model.language_model.layers[0].linear_attn
    assert isinstance(layer, Isolated)
    layer.__class__ = type(layer).__mro__[2]
    with pytest.raises(UnsafeModelError, match="Qwen3_5GatedDeltaNet"):
        check_model(model)


def test_recurrent_layers_that_cannot_be_isolated_are_refused():
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, n_groups=1, state_size=8
    )
    with pytest.raises(UnsafeModelError):
        prepare_model(transformers.Mamba2ForCausalLM(config))


def test_layers_that_pick_what_they_attend_to_are_refused():
    model = prepare_model(llama())
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsafeModelError, match=r"\['chunked_attention'\]"):
        check_model(model)


def test_masks_with_a_pattern_of_their_own_are_refused():
    from transformers.masking_utils import create_causal_mask

    config = prepare_model(llama()).config
    embeds = torch.zeros(1, 4, 32)
    with pytest.raises(UnsafeModelError, match="pattern of its own"):
        create_causal_mask(config, embeds, None, None, or_mask_function=lambda *index: index[2] == index[3])


DECODERS = {
    "Qwen3": {"head_dim": 8},
    "Mistral": {"head_dim": 8, "sliding_window": 4},
    "Gemma2": {"head_dim": 8, "sliding_window": 4},  # capped scores too
    "GptOss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks too
    "Qwen3Next": {"head_dim": 8, **tiny.LINEAR, **tiny.EXPERTS, "shared_expert_intermediate_size": 16},
}


@pytest.mark.parametrize("name", DECODERS)
def test_text_models_run_packs_exactly(name):
    """Any decoder of transformers: windows, capped scores, sinks and linear attention included."""
    build = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(1)
    shape = tiny.DENSE | {"max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1} | DECODERS[name]
    stock = build(build.config_class(**shape, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    prepared = prepare_model(copy.deepcopy(stock))
    rows = [torch.randint(3, 300, (length,)) for length in (9, 1, 14)]
    batch = pack_samples([{"input_ids": row} for row in rows], adapter=adapter_for(stock.config), align=4)
    logits = prepared(**batch.forward_kwargs(prepared)).logits[0]
    for row, start in zip(rows, batch.cu_seqlens_q_padded.tolist(), strict=False):
        want = stock(row[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[start : start + len(row)], want, rtol=1e-5, atol=2e-5)


def test_a_window_that_only_the_mask_knows_is_refused():
    """Such a model's attention layers do not say how far back they look, and a pack has no mask."""
    config = transformers.PhimoeConfig(**tiny.DENSE, num_local_experts=4, sliding_window=4, max_position_embeddings=64)
    with pytest.raises(UnsafeModelError, match="sliding window"):
        prepare_model(transformers.PhimoeForCausalLM(config))


def test_a_padded_batch_still_runs_as_before():
    """A prepared model evaluates ordinary padded batches: the padding mask is honoured."""
    stock, prepared = llama(), prepare_model(llama())
    ids = torch.randint(1, 300, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    want, got = (model(ids, attention_mask=mask, use_cache=False).logits for model in (stock, prepared))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=0, atol=1e-12)
    with pytest.raises(UnsafeModelError, match="cu_seq_lens_q"):
        prepared(ids[:1], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


def test_a_copy_of_a_prepared_model_runs_its_own_weights():
    """An averaged copy must not run the original's weights, as it would with a patched bound method."""
    model = prepare_model(tiny.tiny_model("qwen3_5"))
    adapter = adapter_for(model.config)
    batch = pack_samples([{"input_ids": torch.arange(1, 6)}, {"input_ids": torch.arange(1, 4)}], adapter=adapter)
    twin = copy.deepcopy(model)
    before = twin(**batch.forward_kwargs(twin)).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(**batch.forward_kwargs(twin)).logits, before)


def test_a_prepared_model_keeps_its_name_and_signature():
    stock, model = tiny.tiny_model("qwen3_vl"), prepare_model(tiny.tiny_model("qwen3_vl"))
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration" and isinstance(model, type(stock))
    added = set(inspect.signature(model.forward).parameters) - set(inspect.signature(stock.forward).parameters)
    assert added == {"media_token_validity_mask"}
    assert model.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5_moe", "qwen3_omni_moe"])
def test_isolation_is_seen_in_what_a_model_does(family):
    model = prepare_model(tiny.tiny_model(family)).train()
    assert verify_isolation(model, adapter_for(model.config)) <= 1e-6
    assert model.training


def test_a_leak_is_seen_in_what_a_model_does():
    """The probe needs no knowledge of layers: a model that drops the boundaries is caught."""
    model = tiny.tiny_model("qwen2_5_vl")
    with pytest.raises(UnsafeModelError, match="Qwen2_5_VLForConditionalGeneration mixes the segments"):
        verify_isolation(model, adapter_for(model.config))


class Wrapper(nn.Module):
    """What DDP, FSDP, DeepSpeed and Megatron-Core's Float16Module look like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, input_ids, position_ids=None, *, padding_mask=None, **kwargs):
        return self.linear(input_ids)


class Holder(nn.Module):
    """A model, not a wrapper, with a child of a wrapper's name beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


WRAPPERS = [Wrapper, nn.DataParallel, torch.compile, lambda m: Wrapper(Wrapper(m)), lambda m: torch.compile(Wrapper(m))]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_unwrap(wrap):
    model = Tiny()
    assert unwrap_model(wrap(model)) is model
    names = forward_arguments(wrap(model), adapter_for("text"))
    assert names == {"input_ids", "position_ids", "padding_mask"}, "a bare **kwargs counts for nothing"


def test_unwrap_leaves_models_alone():
    for model in (Tiny(), Holder(), llama(), llama().model):
        assert unwrap_model(model) is model


def test_unwrap_peft():
    peft = pytest.importorskip("peft")
    model = prepare_model(llama())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert unwrap_model(Wrapper(wrapped)) is model
    check_model(wrapped)


def test_unwrap_megatron():
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, bf16=True)
    model = Tiny()
    assert unwrap_model(Float16Module(config, model)) is model


def test_arguments_of_transformers_models():
    model = prepare_model(tiny.tiny_model("qwen2_5_vl"))
    names = forward_arguments(Wrapper(model), adapter_for(model.config))
    assert names >= VARLEN_ARGUMENTS | {"position_ids", "mm_token_type_ids", "pixel_values", "media_token_validity_mask"}
    assert "seq_idx" not in names and "kwargs" not in names
    assert "media_token_validity_mask" not in forward_arguments(tiny.tiny_model("qwen2_5_vl"), adapter_for(model.config))


def test_arguments_that_the_adapter_declares():
    import msgspec

    adapter = msgspec.structs.replace(adapter_for("text"), model_arguments=("packed_seq_params",))
    assert "packed_seq_params" in forward_arguments(Tiny(), adapter)
