"""Megatron-Core's GPTModel on packs: its logits and gradients are those of every sample alone."""

import warnings
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from evenpack.collate import pack_samples
from evenpack.models import adapter_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.packed_seq_params")

pytestmark = pytest.mark.filterwarnings("ignore")
FUSIONS = (
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "bias_dropout_fusion",
)


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    """A world of one rank."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    # Some names are left. A process that is forked later would destroy their groups, whose threads it does not have.
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    dist.destroy_process_group()


def per_segment_attention():
    """Return a core attention that runs where flash attention cannot: real tokens of each segment alone, padding gives 0."""
    from megatron.core.transformer.module import MegatronModule

    class PerSegment(MegatronModule):
        def __init__(self, config, **kwargs: Any):
            super().__init__(config=config)

        def forward(self, query, key, value, *args: Any, packed_seq_params=None, **kwargs: Any):
            output = query.new_zeros(query.shape)
            groups = query.shape[1] // key.shape[1]
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            for start, length in zip(packed_seq_params.cu_seqlens_q_padded.tolist(), lengths, strict=False):
                own = [states[start : start + length].transpose(0, 1) for states in (query, key, value)]
                own[1:] = [states.repeat_interleave(groups, dim=0) for states in own[1:]]
                output[start : start + length] = F.scaled_dot_product_attention(*own, is_causal=True).transpose(0, 1)
            return output.reshape(len(query), -1)

    return PerSegment


def tiny_gpt(positions: str):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_query_groups=1,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        normalization="RMSNorm",
        add_bias_linear=False,
        **dict.fromkeys(FUSIONS, False),
        **({"mrope_section": [2, 3, 3]} if positions == "mrope" else {}),
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = per_segment_attention()
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=128,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
    ).double()


def samples_for(positions: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return an adapter with a small vocabulary, and raw samples; with M-RoPE one of them holds an image."""
    texts = [{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [4]}, {"input_ids": list(range(10, 27))}]
    if positions == "rope":
        return adapter_for("text"), texts
    adapter = msgspec.structs.replace(adapter_for("qwen2_vl"), media_tokens={"image": 60, "video": 61}, pad_token_id=0)
    image = {"input_ids": [3, *[60] * 6, 4, 5], "image_grid_thw": [[1, 4, 6]], "pixel_values": torch.zeros(24, 1176)}
    return adapter, [image, *texts]


@pytest.mark.parametrize("positions", ["rope", "mrope"])
@pytest.mark.parametrize("settings", [{}, {"align": 4, "pack_align": 64}])
def test_a_pack_computes_what_its_samples_compute_alone(monkeypatch, positions, settings):
    # Rotary embeddings ask for the current CUDA device, whatever device they run on.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    model, (adapter, raws) = tiny_gpt(positions), samples_for(positions)

    def run(samples, **more):
        batch = pack_samples(samples, adapter=adapter, **more)
        model.zero_grad()
        logits = model(**batch.forward_kwargs(model) | {"labels": None})
        losses = F.cross_entropy(logits[0], batch.labels[0], reduction="none")
        (losses * batch.loss_mask[0]).sum().backward()
        return batch.unpack(logits), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    packed, gradient = run(raws, **settings)
    expected = torch.zeros_like(gradient)
    for raw, logits in zip(raws, packed, strict=True):
        (alone,), share = run([raw])
        expected += share
        assert (alone - logits).abs().max() < 1e-12
    assert (gradient - expected).abs().max() < 1e-10
