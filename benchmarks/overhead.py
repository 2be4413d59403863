"""What the scheduler costs a training loop: time that `next(scheduler)` is waited for, and time to build the packs.

    python -m benchmarks.overhead [--ranks 2] [--steps 20] [--compute 0.5]

First the start: seconds of CPU, on one core, that a process spends on the planner before its first step, if it must be compiled
(cold), and if numba's cache holds it (warm).

Then every step computes for a fixed time (matrix products on one thread, a barrier at the end), once with `prefetch=0` and once
with `prefetch=1`, on image-text samples. Exposed is what the loop waits for; packing happens when a pack is asked for.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks.exchange import picture_samples
from evenpack.models import adapter_for
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

TARGET = 0.02
#: Seconds of one core in which the planner must be compiled.
COLD_TARGET = 20.0
START = """
import os, sys, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.warm import warm_up_once
start = time.process_time()
warm_up_once(1, SchedulerConfig(max_tokens=8, samples_per_step=1, sync=sys.argv[1]), num_phases=int(sys.argv[2]))
print(time.process_time() - start)
"""


def start_rows() -> None:
    """Print the CPU time of a cold and of a warm start, for either sync point, of a text and of a vision-language model."""
    for sync in ("step", "microbatch"):
        for num_phases, model in ((1, "text"), (2, "vision-language")):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-c", START, sync, str(num_phases)]
                cold, warm = (
                    float(subprocess.run(command, env={**os.environ, "NUMBA_CACHE_DIR": folder}, check=True,
                                         capture_output=True, text=True).stdout)
                    for _ in range(2)
                )  # fmt: skip
            verdict = "pass" if cold < COLD_TARGET else "MISS"
            print(f"start, sync={sync!r:12} {model:15} cold {cold:5.1f} s  target < {COLD_TARGET:.0f} s: {verdict}  "
                  f"warm {warm:4.2f} s", flush=True)  # fmt: skip


def compute(seconds: float, matrix: torch.Tensor) -> None:
    """Multiply matrices for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)


def loop(rank: int, prefetch: int, steps: int, seconds: float, samples_per_step: int) -> tuple[list[float], list[float]]:
    """Return, per step, the share of the step that was waited for, and the share that packing took."""
    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)
    source = picture_samples(rank, samples_per_step) * (steps + 3)
    config = SchedulerConfig(max_tokens=4096, samples_per_step=samples_per_step, prefetch=prefetch)
    waits, packs = [], []
    adapter = adapter_for("qwen2_5_vl")
    with PackingScheduler(source, config=config, adapter=adapter, groups=ProcessGroups.from_world()) as scheduler:
        for _ in range(steps + 2):
            start = time.perf_counter()
            step = next(scheduler)
            waited = time.perf_counter() - start
            packing = 0.0
            for index in range(len(step)):
                begin = time.perf_counter()
                batch = step[index]
                packing += time.perf_counter() - begin
                compute(seconds / len(step), matrix)
                del batch
            dist.barrier()  # as the reduction of gradients does: the ranks begin the next step together
            spent = time.perf_counter() - start
            waits.append(waited / spent)
            packs.append(packing / spent)
    return waits[2:], packs[2:]


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compute", type=float, default=0.5, help="seconds of computation a step")
    parser.add_argument("--samples", type=int, default=16, help="samples per rank and step")
    options = parser.parse_args()
    start_rows()
    for prefetch in (0, 1):
        outcomes = run_ranks(
            lambda rank, _, depth=prefetch: loop(rank, depth, options.steps, options.compute, options.samples),
            options.ranks, backend="gloo", timeout=900,
        )  # fmt: skip
        waits = sorted(share for shares, _ in outcomes for share in shares)
        packs = statistics.median(share for _, shares in outcomes for share in shares)
        median = statistics.median(waits)
        verdict = "" if not prefetch else f"  target < {TARGET:.0%}: {'pass' if median < TARGET else 'MISS'}"
        spread = f"({waits[0]:.2%} to {waits[-1]:.2%})"
        print(f"prefetch={prefetch}: exposed {median:.2%} of the step {spread}, packing {packs:.2%}{verdict}")


if __name__ == "__main__":
    main()
