"""Train a small vision-language model with Megatron-Core on CPU ranks: `python examples/megatron/run.py --pp 2 --cp 2`."""

import argparse
import logging
import warnings

import msgspec
import torch
from megatron.core import parallel_state
from on_cpu import megatron_on_cpu
from tiny_gpt import gpt_config
from tiny_vlm import ADAPTER, VisionGPT, samples
from training import share, train_step, wrapped

from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.testing import run_ranks


def train(steps: int, per_step: int, *, packed: bool = True, lr: float = 0.3) -> list[float]:
    """Train on the calling rank; return the loss of every step.

    Args:
        steps: optimizer steps.
        per_step: samples in a global batch.
        packed: several samples per micro-batch; otherwise one, for comparison.
        lr: learning rate.
    """
    config = gpt_config(torch.float32, num_layers=2, mrope_section=[1, 1, 2])
    chunks = [wrapped(VisionGPT(config))]
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    reads = ranks == (0, 0, 0)
    items = share(samples(steps * per_step), per_step, replica, replicas) if reads else None
    settings = SchedulerConfig(
        max_tokens=64,
        samples_per_step=1,
        pipeline_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        max_segments=None if packed else 1,
    )
    count = per_step // replicas
    adapter = msgspec.structs.replace(ADAPTER, trained_modalities=("image",) if packed else ())
    return [train_step(chunks, items, count, lr, adapter=adapter, settings=settings) for _ in range(steps)]


def on_rank(sizes: dict[str, int], steps: int, per_step: int, *, packed: bool = True) -> list[float]:
    """Set a rank's model parallelism up and train."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        context_parallel_size=sizes.get("cp", 1),
    )
    with megatron_on_cpu():
        return train(steps, per_step, packed=packed)


def main() -> None:
    """Read the command line, train, and print the loss."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    for name, text in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{text}-parallel size")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples in a global batch")
    parser.add_argument("--compare", action="store_true", help="train once more on one sample per micro-batch")
    given = parser.parse_args()
    sizes = {"tp": given.tp, "pp": given.pp, "cp": given.cp}
    num_ranks = given.dp * given.tp * given.pp * given.cp

    def losses(packed: bool = True) -> list[float]:
        return run_ranks(
            lambda rank, size: on_rank(sizes, given.steps, given.batch, packed=packed), num_ranks, backend="gloo", timeout=3600
        )[0]

    found = losses()
    for step, loss in enumerate(found):
        print(f"step {step:3d}  loss {loss:.4f}")
    if given.compare:
        apart = max(abs(one - other) for one, other in zip(found, losses(packed=False), strict=True))
        print(f"largest difference to a run on single samples: {apart:.1e}")


if __name__ == "__main__":
    main()
