"""Planner code of released packages on the same samples as ours, and as our re-implementations of it.

    python -m benchmarks.peers [--ranks 8] [--samples 64]

Packages are installed without their dependencies into `.venv-peers` (about 40 MB), and single files of them run in processes
of their own. What cannot be had or run prints a line that says why. Nothing of them becomes part of this repository.
"""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.scheduler.plan import PlanConfig, plan_step, warm_up

from ..opponents import OPPONENTS
from ..workloads import WORKLOADS, Workload
from .adapters import PEERS
from .environment import build
from .report import HEAD, SAME, Row, agreement, markdown, our_partition, plan_of, row_of, same_packs, verl_tasks

NAMES = ("sft", "long tail", "image-text")
TIMEOUT = 300
#: Packages whose packing is a function that the user writes.
NO_ALGORITHM = {"megatron-energon": "packs with a function that the user writes; it has no algorithm of its own to run"}


def ask(python: Path, peer: str, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Run one peer in its process; return its answers, or why there are none under "missing"."""
    command = [str(python), "-W", "ignore", "-m", "benchmarks.peers.runner", peer]
    try:
        done = subprocess.run(command, input=json.dumps(tasks), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"missing": f"no answer within {TIMEOUT} s"}
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def task_of(workload: Workload, num_ranks: int) -> dict[str, Any]:
    """Return what a peer is told: lengths only, which is all that these packages look at."""
    table = workload.table
    return {
        "lengths": table.padded.tolist(), "home": table.home.tolist(), "num_ranks": num_ranks, "capacity": workload.capacity,
    }  # fmt: skip


def our_rows(workload: Workload, num_ranks: int, config: PlanConfig) -> list[Row]:
    """Return evenpack's rows and those of the re-implementations, which all know the costs."""
    rows = []
    free = PlanConfig(max_tokens=workload.capacity, movement="free")
    planners: dict[str, tuple[Any, PlanConfig, str]] = {
        "evenpack, minimal movement": (plan_step, config, "evenpack"),
        "evenpack, free movement": (plan_step, free, "evenpack"),
        **{name: (planner, config, "re-implemented") for name, planner in OPPONENTS.items()},
    }
    for name, (planner, settings, origin) in planners.items():
        took = []
        for _ in range(3):
            start = time.process_time()
            plan = planner(workload.table, num_ranks=num_ranks, config=settings)
            took.append(time.process_time() - start)
        rows.append(row_of(name, origin, plan, workload.capacity, statistics.median(took)))
    return rows


def all_rows(workload: Workload, num_ranks: int, answers: dict[str, dict[str, Any]], number: int) -> list[Row]:
    """Return ours, the re-implementations, and the released code on one workload."""
    config = PlanConfig(max_tokens=workload.capacity)
    rows = our_rows(workload, num_ranks, config)
    for peer, answer in answers.items():
        if "answers" in answer:
            package, what, _ = PEERS[peer]
            found = answer["answers"][number]
            plan = plan_of(workload, found["ranks"], config)
            origin = f"real: {package} {answer['version']}"
            rows.append(row_of(what, origin, plan, workload.capacity, found["seconds"]))
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="samples of each rank")
    parser.add_argument("--environment", type=Path, default=Path(".venv-peers"), help="folder of the packages")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder of the documentation's table")
    options = parser.parse_args()
    num_ranks = options.ranks
    python, missing = build(options.environment)
    warm_up()
    workloads = [WORKLOADS[name](np.random.default_rng(0), num_ranks, options.samples) for name in NAMES]
    tasks = [task_of(workload, num_ranks) for workload in workloads]
    answers: dict[str, dict[str, Any]] = {}
    for peer, (package, _, _) in PEERS.items():
        needed = (package, "binpacking") if peer == "swift" else (package,)
        reason = next((missing[name] for name in needed if name in missing), None)
        answers[peer] = {"missing": reason} if reason else ask(python, peer, tasks)
    tables: dict[str, list[Row]] = {}
    for number, workload in enumerate(workloads):
        print(f"\n## {workload.name}: {len(workload.table)} samples on {num_ranks} ranks, capacity {workload.capacity}, "
              f"sync=\"step\"\n\n{HEAD}")  # fmt: skip
        tables[workload.name] = all_rows(workload, num_ranks, answers, number)
        for row in tables[workload.name]:
            print(row.line())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "peers.md").write_text(markdown(tables) + "\n", encoding="utf-8")
    print("\n## not run\n")
    for peer, answer in answers.items():
        if "missing" in answer:
            package, what, _ = PEERS[peer]
            print(f"{package} {answer.get('version', '')} ({what}): {answer['missing']}")
    for package, reason in NO_ALGORITHM.items():
        print(f"{package}: {reason}")
    print("\n## our re-implementations against the released code\n")
    compare(python, workloads, answers, num_ranks)


def compare(python: Path, workloads: list[Workload], answers: dict[str, dict[str, Any]], num_ranks: int) -> None:
    """Print, for every function that exists twice, how far both agree."""
    for peer in SAME:
        for number, workload in enumerate(workloads):
            if "answers" in answers[peer]:
                said = agreement(peer, answers[peer]["answers"][number]["ranks"], workload)
                print(f"{PEERS[peer][0]:16} {PEERS[peer][1]:22} {workload.name:12} {said}")
    if "answers" not in answers["verl"]:
        return
    tasks = verl_tasks(workloads, num_ranks)
    theirs = ask(python, "verl-partitions", tasks)["answers"]
    for task, parts, workload in zip(tasks, theirs, [each for each in workloads for _ in range(2)], strict=True):
        said = same_packs(parts, our_partition(task), task["values"])  # type: ignore[arg-type]
        what = f"Karmarkar-Karp, {'equal counts' if task['equal'] else 'any counts'}, {task['parts']} parts"
        print(f"{'verl':16} {what:38} {workload.name:12} {said}")


if __name__ == "__main__":
    main()
