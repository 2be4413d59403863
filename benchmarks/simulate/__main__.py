"""Step times of 64 to 16,384 ranks, simulated from measured micro-batch times, and the time that planning takes there.

    python -m benchmarks.simulate                     # all of it, about 10 minutes
    python -m benchmarks.simulate --quick             # up to 1,024 ranks

A step takes its slowest rank (`step`), or in every micro-batch and phase the slowest rank (`microbatch`). Costs are those of a
tiny vision-language model, fitted to micro-batches timed on this machine, and those of a model of 7 billion parameters, counted
from its configuration. Communication is left out: it is the same for all planners.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.cli.what_if.opponents.alone import packed_alone
from evenpack.cli.what_if.opponents.karmarkar_karp import karmarkar_karp_equal
from evenpack.integrations.megatron import next_fit_planner
from evenpack.scheduler.cost.model import UNITS_PER_TOKEN
from evenpack.scheduler.plan import MediaTowers, StepPlan, plan_step, warm_up

from .groups import CASES, Drawn, config_of, draw, with_errors
from .measure import Measured, measure
from .plot import PANELS, plot
from .tables import planning_table, step_table

RANKS = (64, 256, 1024, 4096, 16_384)
SAMPLES = 64
JUDGED_RANKS = 256
MOST_OVER_BOUND, FASTER_THAN_NEXT_FIT, ATTAINABLE = 1.03, 1.25, 1.02
#: A step of this many seconds, and the share of it that planning may take.
STEP_SECONDS, PLANNING_SHARE = 20.0, 0.02
OURS, NEXT_FIT = "evenpack", "next-fit (Megatron-Core)"
#: Name to planner, and the largest group that its plain Python is run for.
PLANNERS: dict[str, tuple[Callable[..., StepPlan], int]] = {
    OURS: (plan_step, 1 << 30),
    NEXT_FIT: (next_fit_planner, 1 << 30),
    "packed on each rank alone": (packed_alone, 4096),
    "Karmarkar-Karp, equal counts (verl)": (karmarkar_karp_equal, 256),
}
#: Planners whose own time is measured, in one piece: `benchmarks.pods` has what a rank pays where pods share the work.
TIMED: dict[str, Callable[..., StepPlan]] = {"flat": plan_step}
Record = dict[str, Any]


def verdict(met: bool | None) -> str:
    """Return the mark of a row."""
    return "-" if met is None else "pass" if met else "MISS"


def step_rows(drawn: dict[str, Drawn], measured: Measured, ranks: tuple[int, ...]) -> list[Record]:
    """Simulate every case and print its rows."""
    records = []
    for model in ("measured", "7B"):
        print(f"\n## step time over its lower bound, costs: {model}; in brackets with the measured error of the cost model\n")
        for name, sync, phases in CASES:
            for num_ranks in ranks:
                records += case_rows(drawn[name], measured, model, (name, sync, phases), num_ranks)
    return records


def case_rows(drawn: Drawn, measured: Measured, model: str, case: tuple[str, str, bool], num_ranks: int) -> list[Record]:
    """Plan one case with every planner, print a row for each, and return them."""
    name, sync, phases = case
    tiny = model == "measured"
    table = drawn.table(num_ranks, tiny, phases)
    config = config_of(drawn, sync, measured.fit.microbatch_cost if tiny else 0)
    title = f"{name}, 2 phases" if phases else name
    found: list[Record] = []
    for planner, (plan_with, largest) in PLANNERS.items():
        if num_ranks > largest:
            continue
        towers = drawn.workload.towers if phases else MediaTowers()
        plan = plan_with(table, num_ranks=num_ranks, config=config, towers=towers)
        bound = found[0]["plan"].lower_bound if found else plan.lower_bound
        found.append({
            "model": model, "workload": title, "sync": sync, "ranks": num_ranks, "planner": planner, "plan": plan,
            "over_bound": plan.value / bound, "seconds": plan.value * measured.fit.model.unit if tiny else None,
            "noisy": with_errors(plan, config, measured.errors, num_ranks) / bound,
            "attainable": bound <= ATTAINABLE * (table.cost.sum() / num_ranks + config.microbatch_cost * plan.num_microbatches),
        })  # fmt: skip
    for record in found:
        print_row(record, found)
    return [{key: value for key, value in record.items() if key != "plan"} for record in found]


def print_row(record: Record, found: list[Record]) -> None:
    """Print one row; evenpack's at the judged size states its targets."""
    ours = record["planner"] == OURS
    faster = {each["planner"]: each["over_bound"] / found[0]["over_bound"] for each in found}
    judged = record["ranks"] == JUDGED_RANKS and ours
    marks = ""
    if judged:
        near = record["over_bound"] <= MOST_OVER_BOUND if record["attainable"] else None
        marks = f"  <= {MOST_OVER_BOUND} x bound where attainable: {verdict(near)}; "
        fast = verdict(faster[NEXT_FIT] >= FASTER_THAN_NEXT_FIT)
        marks += f">= {FASTER_THAN_NEXT_FIT} x next-fit ({faster[NEXT_FIT]:.2f}): {fast}"
    seconds = f"{record['seconds']:8.2f} s" if record["seconds"] is not None else " " * 10
    head = f"{record['workload']:20} {record['sync']:10} R {record['ranks']:6}" if ours else " " * 40
    print(f"{head}  {record['planner']:36} {record['over_bound']:7.3f} ({record['noisy']:.3f})  {seconds}  "
          f"evenpack is {faster[record['planner']]:5.2f} x{marks}", flush=True)  # fmt: skip


def planning_rows(drawn: dict[str, Drawn], ranks: tuple[int, ...]) -> list[Record]:
    """Time planning, and print its share of a step."""
    limit = STEP_SECONDS * PLANNING_SHARE
    print(f"\n## planning, movement=\"minimal\"; target: under {limit:.1f} s of CPU, {PLANNING_SHARE:.0%} of a step of "
          f"{STEP_SECONDS:.0f} s\n")  # fmt: skip
    records = []
    for name, sync in PANELS:
        for num_ranks in ranks:
            table = drawn[name].table(num_ranks, False, False)
            config = config_of(drawn[name], sync, 0)
            for way, planner in TIMED.items():
                wall, cpu, plan = timed(lambda p=planner, t=table, c=config, r=num_ranks: p(t, num_ranks=r, config=c))
                records.append({"workload": name, "sync": sync, "ranks": num_ranks, "way": way, "cpu": cpu, "wall": wall,
                                "samples": len(table), "gap": plan.gap, "share": cpu / STEP_SECONDS})  # fmt: skip
                print(f"{name:12} {sync:10} {way:9} R {num_ranks:6}  {len(table):9,} samples  CPU {cpu * 1e3:8.1f} ms  "
                      f"clock {wall * 1e3:8.1f} ms  {cpu / STEP_SECONDS:6.2%} of the step  gap {plan.gap:6.3%}  "
                      f"{verdict(cpu < limit)}", flush=True)  # fmt: skip
    return records


def timed(work: Callable[[], StepPlan], repeats: int = 3) -> tuple[float, float, StepPlan]:
    """Return the shortest time on the clock and of this thread's CPU, and the plan."""
    clocks, cpus = [], []
    for _ in range(repeats):
        gc.collect()
        clock, cpu = time.perf_counter(), time.thread_time()
        plan = work()
        clocks.append(time.perf_counter() - clock)
        cpus.append(time.thread_time() - cpu)
    return min(clocks), min(cpus), plan


def described(measured: Measured) -> str:
    """Say what was measured and how well it foretells."""
    fit, errors = measured.fit, measured.errors
    unit = fit.model.unit
    return (
        f"measured: {len(errors) + fit.num_observations} micro-batches of {measured.num_tokens} tokens; fit of half of them: "
        f"{unit * UNITS_PER_TOKEN * 1e6:.1f} us a token, {fit.microbatch_cost * unit * 1e3:.1f} ms a micro-batch, "
        f"R^2 {fit.r_squared:.4f}; median error on the other half {measured.median_error:.1%}, "
        f"from {min(errors) - 1:+.1%} to {max(errors) - 1:+.1%}"
    )


def main() -> None:
    """Measure, simulate, time, plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks")
    parser.add_argument("--micro-batches", type=int, default=40, help="how many are timed (default: %(default)s)")
    parser.add_argument("--only", choices=("steps", "planning"), help="one of the two tables")
    parser.add_argument("--out", type=Path, default=Path("runs/simulate"), help="folder of figures and plot")
    options = parser.parse_args()
    ranks = tuple(count for count in RANKS if not options.quick or count <= 1024)
    warm_up()
    measured = measure(options.micro_batches)
    fit = measured.fit
    print(described(measured), flush=True)
    drawn = {}
    for name in ("image-text", "long tail"):
        print(f"drawing {name} for {ranks[-1]} ranks", file=sys.stderr, flush=True)
        drawn[name] = draw(name, ranks[-1], SAMPLES, fit)
    steps = step_rows(drawn, measured, ranks) if options.only != "planning" else []
    planning = planning_rows(drawn, ranks) if options.only != "steps" else []
    save(options.out, steps, planning)


def save(folder: Path, steps: list[Record], planning: list[Record]) -> None:
    """Write figures, the documentation's tables, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"steps": steps, "planning": planning}, indent=1, default=lambda value: np.asarray(value).tolist())
    (folder / "simulation.json").write_text(text, encoding="utf-8")
    for name, records, table in (("steps", steps, step_table), ("planning", planning, planning_table)):
        if records:
            (folder / f"simulation-{name}.md").write_text(table(records) + "\n", encoding="utf-8")
    if steps:
        plot(steps, folder / "simulation.png")
    print(f"\nfigures, tables and plot: {folder}")


if __name__ == "__main__":
    main()
