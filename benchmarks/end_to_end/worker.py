"""The same trainings as one process per GPU, all modes in turn.

torchrun --nproc-per-node 8 -m benchmarks.end_to_end.worker --samples 32 --max-tokens 8192
"""

import argparse
import functools
import os

import msgspec
import torch
import torch.distributed as dist

from evenpack.scheduler.plan import warm_up

from .__main__ import add_sizes, sizes, turns
from .calibrate import measure_costs
from .data import make_model, make_samples, train_tokenizer
from .report import lines
from .training import MODES, Outcome, train


def start() -> torch.device:
    """Join the process group, over NCCL where every rank has a GPU; return this rank's device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.allow_tf32 = False  # losses are compared in full single precision
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        return torch.device("cuda", local_rank)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})
    dist.init_process_group("gloo")
    return torch.device("cpu")


def main() -> None:
    """Run every mode in turn; rank 0 prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_sizes(parser)
    modes, rounds, setting = sizes(parser)
    device = start()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    warm_up()
    tokenizer = train_tokenizer()
    samples = make_samples(0, rank, num_ranks, setting.num_samples, tokenizer)
    model = functools.partial(make_model, tokenizer)
    costs = [measure_costs(model, samples, device) if rank == 0 else None]
    dist.broadcast_object_list(costs, device=device if device.type == "cuda" else None)
    setting = msgspec.structs.replace(setting, cost=costs[0])
    found: dict[str, list[Outcome]] = {letter: [] for letter in modes}
    for letter in turns(modes, rounds):
        found[letter].append(train(MODES[letter], model, samples, setting, device))
    if rank == 0:
        note = "" if device.type == "cuda" else "; memory is that of the process so far, all modes before included"
        print(f"{num_ranks} ranks on {device.type}, {rounds} rounds{note}")
        print("\n".join(lines(found, setting.steps)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
