"""What a window of several steps gains: value over mean load, bytes, bounds and time, beside single steps and deferral.

    python -m benchmarks.window             # 64 and 256 ranks, some minutes
    python -m benchmarks.window --quick     # fewer steps, two minutes

16 samples a rank, minimal movement; whole epochs, so that the first and the last steps count. "deferred" is the rule of the
version before windows: a sample heavier than the mean rank load waits up to 16 steps for R of its kind. "bound" is what no plan
goes below that packs W steps as one. Every row says whether it meets its target.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_step, warm_up
from evenpack.scheduler.plan.bounds import objective
from evenpack.scheduler.plan.problem import build_problem
from evenpack.scheduler.plan.table import Ints
from evenpack.scheduler.plan.window import WindowBounds, choose_step, roll

from .planner import Report, median_time
from .workloads import WORKLOADS, Workload, image_text_phases

PER_RANK, LOOKAHEAD, DEFER = 16, 8, 16
MAKERS: dict[str, Callable[..., Workload]] = {
    **{name: WORKLOADS[name] for name in ("long tail", "sft", "rl")},
    "image-text, 2 phases": image_text_phases,
}
#: Most value over mean load.
TARGETS = {"step": dict.fromkeys(MAKERS, 1.03), "microbatch": {**dict.fromkeys(MAKERS, 1.05), "image-text, 2 phases": 1.10}}
#: Tokens of a step over the mean of the steps in view, where more than two micro-batches make a step.
LEAST, MOST = 0.9, 1.1
BOUNDS = WindowBounds(lookahead=LOOKAHEAD, tokens=0.1, samples=0.5)


def deferred(tables: list[SampleTable], num_ranks: int) -> Iterator[SampleTable]:
    """Yield the samples of every step where heavy samples wait for R of their kind."""
    waiting, waited = tables[0].select(np.zeros(len(tables[0]), bool)), np.zeros(0, np.int64)
    for number, table in enumerate(tables):
        both = SampleTable.concatenate([waiting, table])
        ages = np.concatenate([waited, np.zeros(len(table), np.int64)])
        order = np.argsort(both.home, kind="stable")
        both, ages = both.select(order), ages[order]
        cost = both.cost.reshape(len(both), -1).sum(axis=1)
        waits = cost * num_ranks > cost.sum()
        heavy = np.flatnonzero(waits)
        oldest = heavy[np.argsort(-ages[heavy], kind="stable")]
        waits[oldest[: len(heavy) // num_ranks * num_ranks]] = False
        waits[ages >= DEFER] = False
        if number == len(tables) - 1:
            waits[:] = False
        waiting, waited = both.select(waits), ages[waits] + 1
        yield both.select(~waits)


class Figures:
    """Plans of a run of steps, taken together."""

    def __init__(self, tables: list[SampleTable], work: Workload, num_ranks: int, config: PlanConfig) -> None:
        plans = [plan_step(table, num_ranks=num_ranks, config=config, towers=work.towers) for table in tables]
        mean = sum(int(table.cost.sum()) for table in tables) / num_ranks
        self.waiting = sum(plan.value for plan in plans) / mean
        self.count = statistics.fmean(plan.num_microbatches for plan in plans)
        self.moved = sum(plan.moved_bytes for plan in plans) / sum(int(table.nbytes.sum()) for table in tables)


def bound_of(tables: list[SampleTable], num_ranks: int, config: PlanConfig) -> float:
    """Return the bound of windows that are packed as one, over the mean load."""
    total = 0
    for at in range(0, len(tables), LOOKAHEAD):
        problem = build_problem(SampleTable.concatenate(tables[at : at + LOOKAHEAD]), num_ranks=num_ranks, config=config)
        total += objective(problem)
    return total * num_ranks / sum(int(table.cost.sum()) for table in tables)


def quality_rows(report: Report, ranks: tuple[int, ...], num_steps: int) -> None:
    """Waiting, bytes and tokens of every workload."""
    report.title(f"value over mean load, {PER_RANK} samples a rank, {num_steps} steps, {LOOKAHEAD} in view")
    for sync in ("microbatch", "step"):
        for name, make in MAKERS.items():
            for num_ranks in ranks:
                works = [make(np.random.default_rng(seed), num_ranks, PER_RANK) for seed in range(num_steps)]
                _quality(report, sync, name, works)


def _quality(report: Report, sync: Any, name: str, works: list[Workload]) -> None:
    num_ranks, tables = int(works[0].table.home.max()) + 1, [work.table for work in works]
    config = PlanConfig(max_tokens=works[0].capacity, sync=sync)

    def noted(lookahead: int) -> list[tuple[SampleTable, Ints]]:
        bounds = WindowBounds(lookahead=lookahead, tokens=BOUNDS.tokens, samples=BOUNDS.samples)
        return list(roll(tables, num_ranks=num_ranks, config=config, capacity=works[0].capacity, bounds=bounds))

    steps = noted(LOOKAHEAD)
    one, held, four, found = (
        Figures(each, works[0], num_ranks, config)
        for each in (
            tables,
            list(deferred(tables, num_ranks)),
            [table for table, _ in noted(4)],
            [table for table, _ in steps],
        )
    )
    tokens = over_mean(steps, [int(table.tokens.sum()) for table in tables])
    distance = float(np.mean(np.concatenate([np.abs(number - turn) for number, (_, turn) in enumerate(steps)])))
    delay = max(int((number - turn).max(initial=0)) for number, (_, turn) in enumerate(steps))
    target = TARGETS[sync][name]
    cells = [
        f"{sync:10s}", f"{name:20s}", f"R {num_ranks:4d}", f"W=1 {one.waiting:5.3f}", f"deferred {held.waiting:5.3f}",
        f"W=4 {four.waiting:5.3f}", f"W={LOOKAHEAD} {found.waiting:5.3f}",
        f"bound {bound_of(tables, num_ranks, config):5.3f}", f"M {found.count:4.2f}",
    ]  # fmt: skip
    report.row(cells, f"{sync}: value over mean load <= {target:.2f} ({name})", found.waiting <= target)
    blank = " " * len("  ".join(cells[:3]))
    moved = f"bytes moved {found.moved:5.1%}, single steps {one.moved:5.1%}"
    report.row([blank, moved], "bytes moved: not above single steps", found.moved <= one.moved)
    text = (
        f"tokens {tokens.min():4.2f} to {tokens.max():4.2f} of the mean in view, "
        f"distance from the turn {distance:4.2f}, at most {delay} late"
    )
    kept = bool(tokens.min() >= LEAST - 0.005 and tokens.max() <= MOST + 0.005)
    judged = kept if found.count > 2.5 else None
    report.row([blank, text], f"tokens of a step: {LEAST} to {MOST} of the mean in view, M > 2", judged)
    assert delay < LOOKAHEAD


def over_mean(steps: list[tuple[SampleTable, Ints]], natural: list[int]) -> Any:
    """Return `[S]` tokens of every step over the mean of the steps in view."""
    found, trained = [], 0
    for number, (table, _) in enumerate(steps):
        ahead = min(number + LOOKAHEAD, len(natural))
        in_view = sum(natural[:ahead]) - trained
        tokens = int(table.tokens.sum())
        found.append(tokens * (ahead - number) / in_view)
        trained += tokens
    return np.array(found)


def speed_rows(report: Report, quick: bool) -> None:
    """Time to choose and plan a step with 131,072 samples in view."""
    report.title("time of a step with 131,072 samples in view, 1,024 ranks")
    works = [WORKLOADS["sft"](np.random.default_rng(seed), 1024, PER_RANK) for seed in range(LOOKAHEAD)]
    view = SampleTable.concatenate([work.table for work in works])
    age = np.repeat(LOOKAHEAD - np.arange(LOOKAHEAD), [len(work.table) for work in works])
    order = np.lexsort((-age, view.home))
    view, age = view.select(order), age[order]
    for sync in ("step", "microbatch"):
        config = PlanConfig(max_tokens=works[0].capacity, sync=sync)  # type: ignore[arg-type]

        def chosen(config: PlanConfig = config) -> SampleTable:
            capacity = works[0].capacity
            keep = choose_step(
                view, age, num_ranks=1024, steps=LOOKAHEAD, config=config, capacity=capacity, bounds=BOUNDS
            )  # fmt: skip
            return view.select(keep)

        choice, used = median_time(chosen, 3 if quick else 9)
        table = chosen()
        whole, cpu = median_time(lambda t=table, c=config: plan_step(t, num_ranks=1024, config=c), 3 if quick else 9)
        planned = f"plan of {len(table)} samples {whole * 1e3:6.1f} ms (CPU {cpu * 1e3:5.1f})"
        cells = [f"{sync:10s}", f"choice {choice * 1e3:6.1f} ms (CPU {used * 1e3:5.1f})", planned]
        report.row(cells, "131,072 samples in view, 1,024 ranks: choice and plan under 300 ms", choice + whole < 0.3)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 steps instead of 64")
    options = parser.parse_args()
    warm_up()
    report = Report()
    speed_rows(report, options.quick)
    quality_rows(report, (64, 256), 24 if options.quick else 64)
    report.summary()


if __name__ == "__main__":
    main()
