"""A training loop of Megatron-Core on packs: the lines marked with + are what a Megatron user adds."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from evenpack.integrations.megatron import forward_step, prepare_model, wrap_data_iterator


def wrapped(model: torch.nn.Module) -> DistributedDataParallel:
    """Return a model chunk in Megatron-Core's data-parallel wrapper, its positions set right for packs."""
    prepare_model(model)  # + M-RoPE under context parallelism
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=False), model)


def train_step(
    chunks: list[DistributedDataParallel], data_iterator: Any, num_microbatches: int, lr: float, **packing: Any
) -> float:
    """Train one global batch with plain SGD.

    Args:
        chunks: this pipeline rank's model chunks.
        data_iterator: samples, on the rank that reads; None elsewhere.
        num_microbatches: `next()` calls that the batch takes.
        lr: learning rate.
        **packing: adapter and settings of `wrap_data_iterator`.

    Returns:
        The loss of the global batch, per token, on every rank.
    """
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if config.virtual_pipeline_model_parallel_size:
        data_iterator = [data_iterator] * len(chunks)
    data_iterator, num_microbatches, _, _ = wrap_data_iterator(data_iterator, config, num_microbatches, **packing)  # +
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,  # +
        data_iterator=data_iterator,
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=config.max_seqlen_per_dp_cp_rank,
        micro_batch_size=1,
    )
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter -= lr * parameter.main_grad
    return mean_loss(reports)


def mean_loss(reports: list[dict[str, torch.Tensor]]) -> float:
    """Return the loss per token over all ranks and micro-batches; the last stage tells the others."""
    total = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        total += report["lm loss"].double().cpu()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(total, dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
    return float(total[0] / total[1])


def share(samples: list[Any], per_step: int, dp_rank: int, dp_size: int) -> Iterator[Any]:
    """Yield a rank's share of every global batch of `per_step` samples."""
    for start in range(0, len(samples), per_step):
        yield from samples[start : start + per_step][dp_rank::dp_size]
