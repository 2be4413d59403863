"""Which models are refused, what setting them up changes, and the wrappers that are looked through."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from evenpack.collate import pack_samples
from evenpack.collate.packs.forward import _varlen_arguments
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, check_model, forward_arguments, prepare_model, unwrap_model, verify_isolation
from evenpack.models.attention.recurrent import Isolated
from evenpack.models.attention.varlen import register_varlen_attention
from evenpack.models.setup.forward import VARLEN_ARGUMENTS
from evenpack.models.setup.prepare import decoder_modules

from .. import tiny

transformers = pytest.importorskip("transformers")
sliding_window_overlay = pytest.importorskip("transformers.masking_utils").sliding_window_overlay


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


BLOCKS = torch.tensor([[0, 0, -1, -1]])
MASKS = {
    "chunks": ("create_chunked_causal_mask", {}),
    "blocks": ("create_causal_mask", {"block_sequence_ids": BLOCKS}),
    "blocks and a window": ("create_sliding_window_causal_mask", {"block_sequence_ids": BLOCKS}),
    "tokens apart": ("create_causal_mask", {"block_sequence_ids": torch.tensor([[0, -1, 0, -1]])}),
    "a union": ("create_causal_mask", {"or_mask_function": lambda *index: index[2] + index[3] == 3}),
    "another window": ("create_causal_mask", {"and_mask_function": sliding_window_overlay(2)}),
    "a cut": ("create_causal_mask", {"and_mask_function": lambda *index: index[3] != 1}),
}


def stock_and_ours(name: str, attention_mask: torch.Tensor | None, positions: torch.Tensor | None):
    """Return the mask that transformers builds for sdpa attention, and the one that it builds for evenpack's."""
    from transformers import masking_utils

    builder, arguments = MASKS[name]
    found = []
    for implementation in ("sdpa", register_varlen_attention()):
        config = llama().config
        config.sliding_window, config.attention_chunk_size = 3, 3
        config._attn_implementation_internal = implementation
        build = getattr(masking_utils, builder)
        found.append(build(config, torch.zeros(1, 4, 32), attention_mask, None, position_ids=positions, **arguments))
    return found


@pytest.mark.parametrize("name", MASKS)
def test_a_pattern_in_a_mask_is_never_left_out(name):
    """It is built as stock models build it, and refused in a pack, whose mask must not be built."""
    for attention_mask in (None, torch.tensor([[1, 1, 1, 0]])):
        stock, ours = stock_and_ours(name, attention_mask, None)
        assert torch.equal(stock, ours) and not torch.equal(ours[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    with pytest.raises(UnsafeModelError, match=r"pattern of its own.*media_blocks"):
        stock_and_ours(name, None, torch.tensor([[0, 1, 0, 1]]))


def test_blocks_of_no_token_are_no_pattern():
    """Molmo 2 wants type ids in training, and builds its blocks from them in rows of text as well."""
    from transformers.masking_utils import create_causal_mask

    config = prepare_model(llama()).config
    for positions in (None, torch.tensor([[0, 1, 0, 1]])):
        mask = create_causal_mask(
            config, torch.zeros(1, 4, 32), None, None, position_ids=positions, block_sequence_ids=torch.full((1, 4), -1)
        )
        assert mask is None


PHI4 = {
    "vision_config": {**tiny.DENSE, "crop_size": 8, "image_size": 8, "patch_size": 2},
    "audio_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "input_size": 16,
        "ext_pw_out_channel": 32, "nemo_conv_channels": 8, "depthwise_separable_out_channel": 32,
    },
}  # fmt: skip


def test_towers_inside_a_decoder_are_no_part_of_it():
    """Phi-4 keeps its towers in its decoder; the convolutions of its audio tower carry nothing along the text row."""
    config = transformers.Phi4MultimodalConfig(**tiny.DENSE, **PHI4, bos_token_id=1, eos_token_id=2)
    model = prepare_model(transformers.Phi4MultimodalForCausalLM(config))
    decoder = decoder_modules(model.get_decoder())
    assert model.model.layers[1].self_attn in decoder and not any("Audio" in type(one).__name__ for one in decoder)


def llava(**settings: Any) -> Any:
    vision = {"model_type": "clip_vision_model", **tiny.DENSE, "image_size": 16, "patch_size": 4}
    config = transformers.LlavaConfig(
        text_config={"model_type": "gemma", **tiny.DENSE, "head_dim": 8, **settings}, vision_config=vision, image_token_id=301
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).double().eval()


def test_a_decoder_that_leaves_its_direction_to_its_mask_is_refused():
    with pytest.raises(UnsafeModelError, match=r"LlavaForConditionalGeneration leaves it to its mask.*GemmaAttention"):
        prepare_model(llava(use_bidirectional_attention=True))
    prepare_model(llava(is_causal=False))  # the mask looks both ways as well


def test_a_tower_never_takes_the_boundaries_of_the_text_row_for_its_own():
    """CLIP sees 17 places here, as many as the row has tokens, and LLaVA hands the row's boundaries on to it."""
    model = prepare_model(llava())
    pixels = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    want = model.model.get_image_features(pixels).pooler_output[0]
    batch = pack_samples([{"input_ids": [1] * 9}, {"input_ids": [2] * 8}], adapter=adapter_for("text"))
    arguments = _varlen_arguments(batch, causal=True)
    got = model.model.get_image_features(pixels, **arguments).pooler_output[0]
    assert torch.equal(want, got)


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
