"""What depends on the length of a row: rotary tables, padding in attention that looks both ways, positions that are cast."""

import copy

import pytest
import torch
import transformers

from evenpack.collate import pack_samples
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, prepare_model, verify_isolation

from . import tiny

SHAPE = tiny.DENSE | {"max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}


def phi3():
    config = transformers.Phi3Config(**SHAPE, original_max_position_embeddings=16, rope_parameters=dict(LONGROPE))
    return transformers.Phi3ForCausalLM(config).double().eval()


def differences(stock, lengths, align=1):
    """Return the largest difference of each sample's outputs in a pack from those of the stock model on it alone."""
    model = prepare_model(copy.deepcopy(stock))
    rows = [torch.randint(3, 60, (length,)) for length in lengths]
    batch = pack_samples([{"input_ids": row} for row in rows], adapter=adapter_for("text"), align=align)
    with torch.no_grad():
        packed = model(**batch.forward_kwargs(model))[0][0]
        alone = [stock(row[None], use_cache=False)[0][0] for row in rows]
    starts = batch.cu_seqlens_q_padded.tolist()
    return [float((packed[start : start + len(one)] - one).abs().max()) for start, one in zip(starts, alone, strict=False)]


def test_longrope_factors_are_those_of_each_sample():
    stock = phi3()
    assert max(differences(stock, (40, 9, 1, 16, 17))) < 1e-12
    assert verify_isolation(prepare_model(copy.deepcopy(stock)), adapter_for("text")) < 1e-12


def test_longrope_of_the_row_is_seen_by_the_probe_and_refused():
    model = prepare_model(phi3())
    rotary = model.model.rotary_emb
    rotary.__class__ = type(rotary).__mro__[2]
    assert verify_isolation(model, adapter_for("text")) < 1e-12, "texts of 9 and 7 tokens show nothing"
    with pytest.raises(UnsafeModelError, match="mixes the segments"):
        verify_isolation(model, adapter_for("text"), lengths=(17, 7))
    batch = pack_samples([{"input_ids": [3, 4]}], adapter=adapter_for("text"))
    with pytest.raises(UnsafeModelError, match=r"longest segment of a row \(rope_type 'longrope'\).*prepare_model"):
        batch.forward_kwargs(model)


def test_padding_that_makes_a_sample_long_is_refused():
    model = prepare_model(phi3())
    samples = [{"input_ids": [3] * 15}, {"input_ids": [3] * 5}]
    pack_samples(samples, adapter=adapter_for("text"), align=16).forward_kwargs(model)
    with pytest.raises(
        UnsafeModelError, match="beyond 16 tokens, and padding makes a sample of 15 tokens 18 long: use align=1"
    ):
        pack_samples(samples, adapter=adapter_for("text"), align=6).forward_kwargs(model)


def test_dynamic_scaling_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, rope_parameters=rope))
    with pytest.raises(UnsafeModelError, match=r"longest row seen so far.*Set rope_parameters to a fixed rule"):
        prepare_model(model)


def bert():
    config = transformers.BertConfig(**{**SHAPE, "intermediate_size": 32}, is_decoder=False)
    return transformers.BertForMaskedLM(config).double().eval()


def bidirectional_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, is_causal=False)).double().eval()


def windowed_mistral():
    config = transformers.MistralConfig(**SHAPE, head_dim=8, sliding_window=3, is_causal=False)
    return transformers.MistralForCausalLM(config).double().eval()


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("build", [bert, bidirectional_llama, windowed_mistral])
def test_padding_is_not_seen_by_attention_that_looks_both_ways(build, align):
    stock = build()
    assert max(differences(stock, (11, 6, 3), align=align)) < 1e-12
    assert verify_isolation(prepare_model(copy.deepcopy(stock)), adapter_for("text")) < 1e-12


def test_a_model_without_a_head_can_be_probed():
    model = prepare_model(transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)))
    assert verify_isolation(model, adapter_for("text")) < 1e-5


XLSTM = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**XLSTM)), "carry a state.*'xLSTM"),
        (lambda: transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(
            **{**SHAPE, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8)), "carry a state.*Rglru"),
        (lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)),
         "attention of its own.*it cannot run packs"),
        (lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SHAPE)), "counts positions from its padding"),
        (lambda: transformers.BartForCausalLM(transformers.BartConfig(vocab_size=64, d_model=32, decoder_layers=1)),
         "takes no position_ids"),
        (lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**SHAPE)), "does not hand.*StableLmDecoderLayer"),
        (lambda: transformers.NemotronForCausalLM(transformers.NemotronConfig(**SHAPE)), "does not hand.*NemotronDecoderLayer"),
        (lambda: transformers.DogeForCausalLM(transformers.DogeConfig(**SHAPE)), "does not hand.*DogeAttention"),
        (lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(
            **SHAPE, no_rope_layers=[0] * SHAPE["num_hidden_layers"])), "by the place in the row"),
        (lambda: transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**SHAPE)), "no attention layer"),
    ],
)  # fmt: skip
def test_what_is_not_known_to_be_isolated_is_refused(model, message):
    with pytest.raises(UnsafeModelError, match=message) as found:
        prepare_model(model())
    assert "prepare_model(model)" not in str(found.value), "it was called already"


def test_a_decoder_in_which_no_attention_is_found_is_refused():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    for layer in model.model.layers:
        layer.self_attn = torch.nn.Identity()
    with pytest.raises(UnsafeModelError, match="no attention layer that goes through transformers' interface"):
        prepare_model(model)


def test_longrope_with_media_positions_is_refused():
    model = tiny.tiny_model("qwen3_vl")
    rotary = model.model.language_model.rotary_emb
    rotary.rope_type = "longrope"
    assert "mrope_section" in str(rotary.config.rope_parameters)
    with pytest.raises(UnsafeModelError, match="combines M-RoPE with rotary factors by length"):
        prepare_model(model)


def test_integer_positions_of_a_family_with_fractions_are_positions():
    model = prepare_model(tiny.tiny_model("qwen3_omni_moe")).eval()
    ids = torch.randint(3, 60, (1, 40))
    places = torch.arange(40).expand(3, 1, 40)
    given = [model(ids, position_ids=places.to(kind)).logits for kind in (torch.float32, torch.int64, torch.int32)]
    for other in given[1:]:
        torch.testing.assert_close(other, given[0])


def fsdp_positions(wrap_decoder):
    """Return the positions that the rotary embedding of a tiny Qwen3-Omni sees under FSDP in bfloat16, and the pack's."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = prepare_model(tiny.tiny_model("qwen3_omni_moe"))
    batch = pack_samples([{"input_ids": [5] * 600}], adapter=adapter_for(model.config))
    kwargs = batch.forward_kwargs(model)
    decoder, seen = model.get_decoder(), []

    def look(module, args, kwargs):
        seen.append([*args, *kwargs.values()][1])

    decoder.rotary_emb.register_forward_pre_hook(look, with_kwargs=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in decoder.layers:
        fully_shard(layer, mp_policy=policy)
    if wrap_decoder:  # the model around it reads its embeddings, so they stay with the model
        fully_shard(decoder, mp_policy=policy, ignored_params=set(decoder.embed_tokens.parameters()))
    fully_shard(model, mp_policy=policy)
    model(**kwargs)
    return seen[0], batch.position_ids


@pytest.mark.parametrize("wrap_decoder", [False, True])
def test_fractional_positions_are_never_cast(wrap_decoder):
    from evenpack.scheduler.testing import run_ranks

    for seen, wanted in run_ranks(lambda rank, num_ranks: fsdp_positions(wrap_decoder), 2, backend="gloo"):
        assert seen.dtype == wanted.dtype == torch.float32
        assert torch.equal(seen.reshape(-1, 600)[-1], wanted.reshape(-1, 600)[-1]) and len(seen.unique()) == 600
