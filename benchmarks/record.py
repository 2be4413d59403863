"""What the run log costs: recording a step, against planning it, in one run.

    python -m benchmarks.record [--ranks 64 256] [--samples 64] [--steps 40]

The scheduler's own time is taken as planning and statistics alone, which is less than it is: collecting, gather, exchange and
packing are left out. Recording is what the training thread spends in the callback, while the log's thread writes the step
before; beside it, the processor time that this thread spends on a step (it waits for the disk besides).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from evenpack.scheduler import RunLog, SchedulerConfig, plan_step
from evenpack.scheduler.plan import warm_up
from evenpack.scheduler.stats import step_stats
from evenpack.scheduler.telemetry.run_log.record import RunHeader, encode_step
from evenpack.scheduler.telemetry.run_log.store import StepWriter

from .workloads import WORKLOADS, image_text_phases

TARGET = 0.01


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(make: Callable[..., Any], num_ranks: int, per_rank: int, num_steps: int, folder: Path) -> None:
    """Print the shares for one workload."""
    log, file, context = RunLog(folder / "log", max_waiting=num_steps), None, None
    calls, threads, own, sizes = [], [], [], []
    for number in range(num_steps):
        work = make(np.random.default_rng(number), num_ranks, per_rank)
        phases = work.table.cost.reshape(len(work.table), -1).shape[1]
        dummies = dict.fromkeys(work.towers.dummy_tokens, (1,) * phases)
        towers = msgspec.structs.replace(work.towers, dummy_cost=dummies)
        config = SchedulerConfig(max_tokens=work.capacity, samples_per_step=per_rank)

        def planned(work: Any = work, config: Any = config, towers: Any = towers, number: int = number) -> Any:
            plan = plan_step(work.table, num_ranks=num_ranks, config=config, towers=towers)
            return plan, step_stats(work.table, plan, config=config, step=number)

        seconds, (plan, stats) = timed(planned)
        context = context or SimpleNamespace(  # one for all steps, as a scheduler has
            config=config, towers=towers, cp_size=1, planner="plan_step", phases=("decoder",) * phases,
            channel=SimpleNamespace(peers=None, node_of_rank=(0,) * num_ranks),
        )  # fmt: skip
        step: Any = SimpleNamespace(is_writer=True, context=context, table=work.table, plan=plan, stats=stats)
        if file is None:
            (folder / "beside").mkdir()
            file = StepWriter(folder / "beside", RunHeader.of(step, 0.0))
        call, _ = timed(lambda step=step: log(step))
        start = time.thread_time()
        size = written(step, file)
        thread = time.thread_time() - start
        if number:  # the first opens the file
            own.append(seconds), calls.append(call), threads.append(thread), sizes.append(size / len(work.table))
    log.close()
    file.close()
    share = statistics.median(calls) / statistics.median(own)
    print(
        f"{work.name:22} {num_ranks:4} ranks: planning {statistics.median(own) * 1e3:6.2f} ms, recording "
        f"{statistics.median(calls) * 1e6:5.1f} us = {share:.2%} of it (target < {TARGET:.0%}: "
        f"{'pass' if share < TARGET else 'MISS'}), the log's thread computes "
        f"{statistics.median(threads) / statistics.median(own):.1%}, {statistics.mean(sizes):.1f} bytes a sample"
    )


def written(step: Any, file: StepWriter) -> int:
    """Do what the log's thread does for a step; return the record's size."""
    file.write([(step.stats, step.table, step.plan, file.header)])
    return len(encode_step(step.stats, step.table, step.plan))


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--samples", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    warm_up()
    for num_ranks in options.ranks:
        for make in (WORKLOADS["sft"], WORKLOADS["image-text"], image_text_phases):
            with tempfile.TemporaryDirectory() as folder:
                measure(make, num_ranks, options.samples, options.steps, Path(folder))


if __name__ == "__main__":
    main()
