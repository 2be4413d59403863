"""Runs one package's code on tasks from standard input; started by `__main__` inside the environment of the packages.

Input: JSON list of tasks. Output, last line: JSON with the package's version and, per task, packs per rank and seconds.
"""

import importlib.metadata
import json
import statistics
import sys
import time

from .adapters import PEERS, Task, load_verl

REPEATS = 3


def main() -> None:
    """Run the peer that the first argument names; "verl-partitions" gives its bare function's partitions."""
    name = sys.argv[1]
    tasks = json.load(sys.stdin)
    if name == "verl-partitions":
        module = load_verl()
        answers = [module.karmarkar_karp(task["values"], task["parts"], equal_size=task["equal"]) for task in tasks]
        print(json.dumps({"version": importlib.metadata.version("verl"), "answers": answers}))
        return
    package, _, make = PEERS[name]
    version = importlib.metadata.version(package)
    try:
        run = make()
    except LookupError as error:
        print(json.dumps({"version": version, "missing": str(error)}))
        return
    answers = []
    for task in [Task(**entry) for entry in tasks]:
        took = []
        for _ in range(REPEATS):
            start = time.process_time()
            ranks = run(task)
            took.append(time.process_time() - start)
        answers.append({"ranks": ranks, "seconds": statistics.median(took)})
    print(json.dumps({"version": version, "answers": answers}, default=int))


if __name__ == "__main__":
    main()
