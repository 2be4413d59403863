"""Planning time of one rank where very many plan together: in pods of ranks, against the plan in one piece.

    python -m benchmarks.pods                 # 16,384 ranks, 1,048,576 samples
    python -m benchmarks.pods --quick         # 2,048 ranks
    python -m benchmarks.pods --no-flat       # without the plan in one piece, which takes most of the time

Seconds are CPU time of one thread. A rank pays for the coarse level (bounds, sharing out), for its own pod (the slowest is
shown), and for putting the pods together (certificate, digest). All pods are planned here, one after the other, timed one by
one; what the gather takes on a network is not in it, its bytes are shown.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workloads import WORKLOADS, Workload, image_text_phases
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan, plan_in_pods, plan_step, warm_up
from evenpack.scheduler.plan.limits import POD_RANKS
from evenpack.scheduler.plan.two_level import pods

#: A step of this many seconds, and the share of it that planning may take.
STEP_SECONDS, SHARE = 20.0, 0.02
#: Largest objective over that of the plan in one piece.
MOST = 1.01
MAKERS: dict[str, Callable[..., Workload]] = {
    "image-text": WORKLOADS["image-text"],
    "sft": WORKLOADS["sft"],
    "two phases": image_text_phases,
}
MODES = [(sync, movement) for movement in ("minimal", "free") for sync in ("step", "microbatch")]


class Clock:
    """CPU seconds of this thread by part of the planner, nested parts taken out of the outer ones."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""

        def run(*args: Any, **more: Any) -> Any:
            start = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*args, **more)
            finally:
                took = time.thread_time() - start
                self.spent.setdefault(name, []).append(took - self._inner.pop())
                self._inner[-1] += took

        return run


def planned_in_pods(
    table: SampleTable, num_ranks: int, config: PlanConfig, towers: MediaTowers, nodes: Any, number: int
) -> tuple[StepPlan, Clock, int]:
    """The plan by pods, the time of its parts, and how many rounds of pods it took."""
    clock = Clock()
    parts = {
        "build_problem": ("coarse", pods.build_problem),
        "certify": ("assemble", pods.certify),
        "assign_to_pods": ("coarse", pods.assign_to_pods),
        "finish": ("assemble", pods.finish),
        "_plan_pod": ("pod", pods._plan_pod),
        "_planned": ("assemble", pods._planned),
    }
    for name, (part, function) in parts.items():
        setattr(pods, name, clock.timed(part, function))
    try:
        plan = clock.timed("coarse", plan_in_pods)(
            table, num_ranks=num_ranks, config=config, towers=towers, node_of_rank=nodes, pods=number
        )
    finally:
        for name, (_, function) in parts.items():
            setattr(pods, name, function)
    return plan, clock, len(clock.spent.get("pod", ())) // number


def row(name: str, workload: Workload, num_ranks: int, number: int, sync: str, movement: str, flat: bool) -> list[bool]:
    """Print one line; returns the verdicts."""
    config = PlanConfig(max_tokens=workload.capacity, sync=sync, movement=movement)  # type: ignore[arg-type]
    table, nodes = workload.table, (np.arange(num_ranks) // 8).tolist()
    gc.collect()
    plan, clock, rounds = planned_in_pods(table, num_ranks, config, workload.towers, nodes, number)
    own = np.array(clock.spent["pod"]).reshape(max(rounds, 1), -1).sum(axis=0)
    coarse, assemble = sum(clock.spent["coarse"]), sum(clock.spent["assemble"])
    rank = coarse + assemble + float(own.max())
    cells = [f"{name:10s} {sync:10s} {movement:8s} M {plan.num_microbatches:2d}",
             f"rank {rank:5.3f} s = coarse {coarse:5.3f} + pod {own.max():5.3f} + assemble {assemble:5.3f}",
             f"mean pod {own.mean():5.3f}",
             f"gap {plan.gap:7.3%}", f"moved {plan.moved_bytes / table.nbytes.sum():6.2%}",
             f"gathered {(len(table) + 4 * num_ranks) * 4 / 1e6:.1f} MB x {rounds}"]  # fmt: skip
    verdicts = [rank < STEP_SECONDS * SHARE]
    if flat:
        gc.collect()
        start = time.thread_time()
        whole = plan_step(table, num_ranks=num_ranks, config=config, towers=workload.towers, node_of_rank=nodes)
        took = time.thread_time() - start
        ratio = plan.value / whole.value
        cells += [
            f"in one piece {took:6.2f} s, objective x{ratio:.4f}, bytes x{plan.moved_bytes / max(whole.moved_bytes, 1):.3f}"
        ]
        verdicts.append(ratio <= MOST)
    print("  ".join([*cells, " ".join("pass" if good else "MISS" for good in verdicts)]), flush=True)
    return verdicts


def main() -> None:
    """Print a line per workload, sync point and movement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,048 ranks")
    parser.add_argument("--no-flat", action="store_true", help="leave out the plan in one piece")
    parser.add_argument("--only", default=",".join(MAKERS), help=f"workloads, of: {', '.join(MAKERS)}")
    options = parser.parse_args()
    warm_up()
    plan_in_pods(
        SampleTable.from_lengths(np.arange(1, 65), home=np.arange(64) % 8),
        num_ranks=8,
        config=PlanConfig(max_tokens=500),
        pods=2,
    )
    num_ranks = 2048 if options.quick else 16_384
    number = num_ranks // POD_RANKS
    targets = f"rank < {STEP_SECONDS * SHARE:.1f} s ({SHARE:.0%} of a step of {STEP_SECONDS:.0f} s)"
    print(f"{num_ranks} ranks, {num_ranks * 64} samples, {number} pods; targets: {targets}, "
          f"objective within {MOST - 1:.0%} of the plan in one piece")  # fmt: skip
    verdicts: list[bool] = []
    for name in options.only.split(","):
        workload = MAKERS[name](np.random.default_rng(0), num_ranks, 64)
        for sync, movement in MODES:
            # With two phases the plan in one piece takes minutes at this size.
            flat = not options.no_flat and (options.quick or name != "two phases")
            verdicts += row(name, workload, num_ranks, number, sync, movement, flat)
    print(f"{sum(verdicts)} of {len(verdicts)} targets met")


if __name__ == "__main__":
    main()
