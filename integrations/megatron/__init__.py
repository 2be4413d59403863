"""Megatron-Core: one call per global batch turns a data iterator into balanced THD micro-batches.

    data_iterator, num_microbatches, seqlen_sum, seqlen_squared_sum = wrap_data_iterator(
        train_data_iterator, config, get_num_microbatches()
    )

Signature and return value are those of the scheduler on Megatron-Core's development branches. Nothing here imports
Megatron-Core before it is called.
"""

from .attention import segment_attention
from .batch import StageBatch, get_packed_batch, next_batch
from .bridge import to_bridge
from .forward import forward_step, model_arguments
from .model import prepare_model
from .next_fit import next_fit_planner
from .session import load_state, state_of
from .wrap import wrap_data_iterator

__all__ = [
    "StageBatch",
    "forward_step",
    "get_packed_batch",
    "load_state",
    "model_arguments",
    "next_batch",
    "next_fit_planner",
    "prepare_model",
    "segment_attention",
    "state_of",
    "to_bridge",
    "wrap_data_iterator",
]
