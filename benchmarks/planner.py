"""The planner's table: distance from the bound, bytes moved, time, and other frameworks' algorithms in the same run.

    python -m benchmarks.planner            # all of it, some minutes
    python -m benchmarks.planner --quick    # one seed, 16 ranks

Every row states its target and whether it was met. "Attainable" rows are those whose lower bound lies within 2% of the
mean load of the ranks: elsewhere one heavy sample decides, and the row is reported, not judged. Times are medians on this
machine, next to a plain-Python next-fit over the same samples.
"""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evenpack.scheduler.plan import PlanConfig, StepPlan, plan_step, warm_up

from .opponents import OPPONENTS
from .opponents.common import overflow, pack_in_order
from .water_fill import water_fill
from .workloads import WORKLOADS, Workload, image_text_phases

ATTAINABLE = 1.02
SYNCS = ("step", "microbatch")
#: Bound of the bytes below which a ratio to it says nothing: a fraction of all bytes.
MEANINGFUL = 0.01
TOLERANCES = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05)


class Report:
    """Rows of a table on the terminal, and how many judged rows met their target."""

    def __init__(self) -> None:
        self.verdicts: dict[str, list[bool]] = {}

    def title(self, text: str) -> None:
        print(f"\n## {text}\n", flush=True)

    def row(self, cells: Iterable[str], target: str, met: bool | None) -> None:
        """Print a row; `met` None: reported, not judged."""
        mark = "-" if met is None else "pass" if met else "MISS"
        print("  ".join(cells) + f"  {mark}", flush=True)
        if met is not None:
            self.verdicts.setdefault(target, []).append(met)

    def summary(self) -> None:
        self.title("summary")
        for target, verdicts in self.verdicts.items():
            mark = "pass" if all(verdicts) else "MISS"
            print(f"{mark}  {sum(verdicts):3d} of {len(verdicts):3d} rows  {target}", flush=True)


def plans(
    make: Callable[..., Workload], num_ranks: int, per_rank: int, seeds: int, planner: Callable[..., StepPlan], **settings: Any
) -> tuple[list[StepPlan], list[Workload]]:
    """Plan one workload for several seeds."""
    found, workloads = [], []
    for seed in range(seeds):
        workload = make(np.random.default_rng(seed), num_ranks, per_rank)
        config = PlanConfig(max_tokens=workload.capacity, **settings)
        found.append(planner(workload.table, num_ranks=num_ranks, config=config, towers=workload.towers))
        workloads.append(workload)
        if planner is plan_step:
            assert found[-1].padded.max() <= workload.capacity, "capacity exceeded"
    return found, workloads


def attainable(found: list[StepPlan]) -> bool:
    """Whether the bound lies near the mean load: no single sample decides."""
    loads = [plan.cost.sum() / plan.num_ranks for plan in found]
    return all(plan.lower_bound <= ATTAINABLE * load for plan, load in zip(found, loads, strict=True))


def mean_gap(found: list[StepPlan]) -> float:
    return statistics.fmean(plan.gap for plan in found)


def free_rows(report: Report, ranks: tuple[int, ...], seeds: int) -> None:
    """Free movement against the bound and against a water-fill."""
    report.title("free movement: gap to the bound (water-fill beside it), 64 samples a rank")
    for sync, most in (("step", 0.003), ("microbatch", 0.007)):
        for name, make in WORKLOADS.items():
            for num_ranks in ranks:
                found, _ = plans(make, num_ranks, 64, seeds, plan_step, sync=sync, movement="free")
                water, _ = plans(make, num_ranks, 64, 1 if num_ranks > 64 else seeds, water_fill, sync=sync)
                gap, other = mean_gap(found), mean_gap(water)
                beside = mean_gap(found[: len(water)])  # the same seeds
                judged = attainable(found)
                met = gap <= most and beside <= other if judged else None
                cells = [f"{sync:10s}", f"{name:14s}", f"R {num_ranks:4d}", f"gap {gap:8.4%}", f"water-fill {other:8.4%}"]
                report.row(cells, f"free, {sync}: gap <= {most:.1%} and not above a water-fill", met)


def minimal_rows(report: Report, ranks: tuple[int, ...], seeds: int, per_rank: int = 64) -> None:
    """Minimal movement: gap, bytes, and bytes against the bound."""
    report.title(f"minimal movement, tolerance 1%, {per_rank} samples a rank")
    for sync, most, times, share in (("step", 0.01, 1.5, 0.20), ("microbatch", 0.015, 3.0, 0.30)):
        for name, make in WORKLOADS.items():
            for num_ranks in ranks:
                found, workloads = plans(make, num_ranks, per_rank, seeds, plan_step, sync=sync)
                total = statistics.fmean(int(workload.table.nbytes.sum()) for workload in workloads)
                moved = statistics.fmean(plan.moved_bytes for plan in found) / total
                bound = statistics.fmean(plan.moved_bytes_lower_bound for plan in found) / total
                gap, judged = mean_gap(found), attainable(found) and per_rank == 64
                limit = 0.12 if sync == "microbatch" and name == "image-text" else share
                ratio = moved / bound if bound else float("inf")
                cells = [f"{sync:10s}", f"{name:14s}", f"R {num_ranks:4d}", f"gap {gap:7.3%}", f"moved {moved:6.2%}",
                         f"bound {bound:6.2%}", f"x {ratio:5.2f}"]  # fmt: skip
                report.row([*cells, "gap"], f"minimal, {sync}: gap <= {most:.1%}", gap <= most if judged else None)
                few = moved <= limit and (ratio <= times or bound < MEANINGFUL)
                target = f"minimal, {sync}: bytes <= {times} x the bound and <= {share:.0%} (12% on image-text micro-batches)"
                report.row([*(" " * len(cell) for cell in cells), "bytes"], target, few if judged else None)


def phase_rows(report: Report, ranks: tuple[int, ...], seeds: int) -> None:
    """Vision and decoder with a barrier after each."""
    report.title("two phases (vision, decoder), micro-batch sync")
    for num_ranks in ranks:
        found, _ = plans(image_text_phases, num_ranks, 64, seeds, plan_step, sync="microbatch", movement="free")
        gap = mean_gap(found)
        report.row([f"free     R {num_ranks:4d}", f"gap {gap:7.3%}"], "two phases: gap <= 3% free", gap <= 0.03)
        for tolerance in (0.01, 0.03, 0.05):
            found, works = plans(image_text_phases, num_ranks, 64, seeds, plan_step, sync="microbatch", tolerance=tolerance)
            moved = statistics.fmean(p.moved_bytes / w.table.nbytes.sum() for p, w in zip(found, works, strict=True))
            cells = [
                f"minimal  R {num_ranks:4d}",
                f"gap {mean_gap(found):7.3%}",
                f"tolerance {tolerance:.0%}",
                f"moved {moved:6.2%}",
            ]
            report.row(cells, "", None)


#: Targets that several rows share.
COUNT_TARGET = "micro-batches: objective within 0.1% of the best; the smallest feasible where their cost is large"
LARGE_TARGET = "1,048,576 samples on 4,096 ranks: under 3 s, under 1 GiB more, per sample within 3 x"


def count_rows(report: Report) -> None:
    """The chosen number of micro-batches against every fixed number nearby."""
    report.title("number of micro-batches, 16 ranks, free movement")
    for name in ("sft", "bimodal", "image-text"):
        workload = WORKLOADS[name](np.random.default_rng(0), 16, 64)
        for sync in SYNCS:
            for share in (0.0, 0.01, 1.0):
                fixed_cost = int(share * workload.table.cost.sum() / 16)
                config = PlanConfig(max_tokens=workload.capacity, sync=sync, movement="free", microbatch_cost=fixed_cost)
                plan = plan_step(workload.table, num_ranks=16, config=config)
                values = {}
                for count in range(max(plan.num_microbatches - 4, 1), plan.num_microbatches + 5):
                    try:
                        fixed = msgspec.structs.replace(config, num_microbatches=count)
                        values[count] = plan_step(workload.table, num_ranks=16, config=fixed).value
                    except ValueError:
                        continue
                best, smallest = min(values.values()), min(values)
                met = plan.value <= best * 1.001 and (share < 1.0 or plan.num_microbatches == smallest)
                cells = [f"{name:12s}", f"{sync:10s}", f"cost per micro-batch {share:4.0%} of a rank's load",
                         f"chosen {plan.num_microbatches:3d}", f"smallest {smallest:3d}",
                         f"value / best {plan.value / best:.5f}"]  # fmt: skip
                report.row(cells, COUNT_TARGET, met)


def median_time(work: Callable[[], Any], times: int) -> tuple[float, float]:
    """Medians of several runs: seconds on the clock, and seconds of this process's CPU (less on a busy machine)."""
    took, used = [], []
    for _ in range(times):
        gc.collect()
        start, cpu = time.perf_counter(), time.process_time()
        work()
        took.append(time.perf_counter() - start)
        used.append(time.process_time() - cpu)
    return statistics.median(took), statistics.median(used)


def speed_rows(report: Report, quick: bool) -> None:
    """Time and memory of large steps."""
    report.title("time, lengths as in sft")
    start = time.perf_counter()
    warm_up()
    print(f"warm-up (compiled code is cached): {time.perf_counter() - start:.2f} s")
    workload = WORKLOADS["sft"](np.random.default_rng(0), 1024, 64)
    lengths = workload.table.padded.tolist()
    per_sample = {}
    for sync in SYNCS:
        for movement in ("minimal", "free"):
            config = PlanConfig(max_tokens=workload.capacity, sync=sync, movement=movement)
            took, cpu = median_time(lambda c=config: plan_step(workload.table, num_ranks=1024, config=c), 3 if quick else 9)
            plain, _ = median_time(lambda: pack_in_order(lengths, workload.capacity), 3 if quick else 9)
            per_sample[sync, movement] = took / 65_536
            cells = [f"65,536 samples, 1,024 ranks  {sync:10s} {movement:8s}", f"{took * 1e3:6.1f} ms (CPU {cpu * 1e3:5.1f})",
                     f"plain next-fit {plain * 1e3:6.1f} ms", f"ratio {took / plain:5.1f}"]  # fmt: skip
            report.row(cells, "65,536 samples on 1,024 ranks: median under 100 ms", took < 0.1)
            report.row(
                [*(" " * len(cell) for cell in cells), "stretch"], "stretch: under twice a plain next-fit", took < 2 * plain
            )
    for sync in SYNCS:
        for movement in ("minimal", "free"):
            command = [sys.executable, "-m", "benchmarks.planner", "--large", sync, movement]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            relative = answer["seconds"] / 1_048_576 / per_sample[sync, movement]
            clock = f"{answer['seconds']:5.2f} s (CPU {answer['cpu']:5.2f})"
            cells = [f"1,048,576 samples, 4,096 ranks  {sync:10s} {movement:8s}", clock,
                     f"{answer['mebibytes']:6.0f} MiB", f"per sample {relative:4.2f} x"]  # fmt: skip
            met = answer["seconds"] < 3 and answer["mebibytes"] < 1024 and relative <= 3
            report.row(cells, LARGE_TARGET, met)


def large(sync: str, movement: str) -> None:
    """One large plan in a process of its own, so that its peak memory can be read."""
    warm_up()
    workload = WORKLOADS["sft"](np.random.default_rng(0), 4096, 256)
    config = PlanConfig(max_tokens=workload.capacity, sync=sync, movement=movement)  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, cpu = median_time(lambda: plan_step(workload.table, num_ranks=4096, config=config), 3)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "cpu": cpu, "mebibytes": (after - before) / 1024}))


def opponent_rows(report: Report, ranks: tuple[int, ...]) -> None:
    """Other frameworks' algorithms on the same samples: objective over the bound."""
    report.title("opponents (re-implemented from public descriptions): value over the bound, 64 samples a rank")
    for sync in SYNCS:
        for name, make in WORKLOADS.items():
            for num_ranks in ranks:
                workload = make(np.random.default_rng(0), num_ranks, 64)
                config = PlanConfig(max_tokens=workload.capacity, sync=sync, movement="free")
                ours = plan_step(workload.table, num_ranks=num_ranks, config=config)
                ratio = ours.value / ours.lower_bound
                print(f"{sync:10s}  {name:14s}  R {num_ranks:4d}  ours {ratio:.6f}  M {ours.num_microbatches}")
                for opponent, planner in OPPONENTS.items():
                    other = planner(workload.table, num_ranks=num_ranks, config=config, towers=workload.towers)
                    cells = [f"    {opponent:36s}", f"{other.value / other.lower_bound:9.6f}", f"M {other.num_microbatches:3d}",
                             f"over capacity {overflow(other, workload.capacity):6.2%}"]  # fmt: skip
                    report.row(cells, "lower objective than every opponent", ours.value < other.value)


def frontier(path: Path, num_ranks: int) -> None:
    """Plot gap against bytes moved for several tolerances."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    makers = {**WORKLOADS, "image-text, 2 phases": image_text_phases}
    for axis, sync in zip(axes, SYNCS, strict=True):
        for name, make in makers.items():
            workload = make(np.random.default_rng(0), num_ranks, 64)
            points = []
            for tolerance in TOLERANCES:
                config = PlanConfig(max_tokens=workload.capacity, sync=sync, tolerance=tolerance)
                plan = plan_step(workload.table, num_ranks=num_ranks, config=config, towers=workload.towers)
                points.append((plan.gap * 100, plan.moved_bytes / workload.table.nbytes.sum() * 100))
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(title=f'sync="{sync}", {num_ranks} ranks', xlabel="gap to the lower bound (%)")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("bytes that leave their rank (%)")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"\nfrontier of gap against bytes, tolerances 0.2% to 5%: {path}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 16 ranks")
    parser.add_argument("--out", type=Path, default=Path("runs/planner"), help="folder of the plot")
    parser.add_argument("--only", default="", help="comma-separated: free, minimal, phases, counts, speed, opponents, frontier")
    parser.add_argument("--large", nargs=2, metavar=("SYNC", "MOVEMENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        large(*options.large)
        return
    warm_up()
    ranks, seeds = ((16,), 1) if options.quick else ((16, 64, 256), 5)
    report = Report()
    parts: dict[str, Callable[[], None]] = {
        "free": lambda: free_rows(report, ranks, seeds),
        "minimal": lambda: [minimal_rows(report, ranks, seeds, each) for each in ((64,) if options.quick else (64, 16, 8))],
        "phases": lambda: phase_rows(report, ranks, seeds),
        "counts": lambda: count_rows(report),
        "speed": lambda: speed_rows(report, options.quick),
        "opponents": lambda: opponent_rows(report, ranks[:2]),
        "frontier": lambda: frontier(options.out / "frontier.png", 16 if options.quick else 64),
    }
    for name in options.only.split(",") if options.only else parts:
        parts[name]()
    report.summary()


if __name__ == "__main__":
    main()
