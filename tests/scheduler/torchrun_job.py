"""A job for torchrun: every rank steps through its samples and writes what it got."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from evenpack.models import adapter_for
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig


def main(folder: str) -> None:
    """Run one epoch and leave this rank's sample ids in `folder`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lengths = torch.randint(3, 100, (20,), generator=torch.Generator().manual_seed(rank)).tolist()
    source = [{"input_ids": [rank] * length, "sample_id": f"{rank}-{index}"} for index, length in enumerate(lengths)]
    config = SchedulerConfig(max_tokens=256, samples_per_step=8, timeout=30.0)
    got = []
    with PackingScheduler(source, config=config, adapter=adapter_for("text"), groups=ProcessGroups.from_world()) as scheduler:
        for step in scheduler:
            got.append([[name for name in batch.sample_ids if name is not None] for batch in step])
    Path(folder, f"{rank}.json").write_text(json.dumps(got))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
