"""A small GPTModel of the local specification, equal under any tensor and pipeline split."""

import zlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from evenpack.integrations.megatron import segment_attention

#: Kernels that need a GPU.
FUSIONS = (
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "bias_dropout_fusion",
)


class HostRMSNorm(torch.nn.Module):
    """RMS normalisation without a fused kernel, marked for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return F.rms_norm(states, (states.shape[-1],), self.weight, self.eps)


def gpt_config(dtype: torch.dtype = torch.float32, **more: Any) -> TransformerConfig:
    """Return the config of a small decoder under the parallel sizes that are initialised."""
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    settings: dict[str, Any] = dict(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        normalization="RMSNorm",
        add_bias_linear=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        max_seqlen_per_dp_cp_rank=64,
        **dict.fromkeys(FUSIONS, False),
    )
    if vpp:
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, "microbatch_group_size_per_vp_stage": pp}
    return TransformerConfig(**(settings | more))


def gpt_model(
    config: TransformerConfig, *, vocabulary: int = 64, positions: str = "rope", vp_stage: int | None = None
) -> GPTModel:
    """Return one pipeline stage with weights that depend on their names alone."""
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = segment_attention()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = HostRMSNorm
    here = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * (config.num_layers // chunks), HostRMSNorm),
        vocab_size=vocabulary,
        max_sequence_length=4096,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(**here),
        post_process=parallel_state.is_pipeline_last_stage(**here),
        vp_stage=vp_stage,
    )
    fill_weights(model)
    return model.to(config.params_dtype)


def fill_weights(model: GPTModel) -> None:
    """Fill every matrix from a seed that is its name's, and take this tensor-parallel rank's part of it."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        prefix, _, rest = name.partition("layers.")
        if rest:
            number, _, rest = rest.partition(".")
            name = f"{prefix}layers.{model.decoder.layers[int(number)].layer_number}.{rest}"
        axis = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if axis >= 0:
            shape[axis] *= size
        whole = (
            torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64) * 0.1
        )
        part = whole.chunk(size, axis)[rank] if axis >= 0 else whole
        parameter.data.copy_(part)
