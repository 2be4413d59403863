"""Run by the interpreter of an environment that evenpack was installed into: all public names are there, and a step runs.

python -I check_installed.py FOLDER_OF_THE_ENVIRONMENT
"""

import importlib
import pkgutil
import sys
import warnings

import evenpack
from evenpack.models import adapter_for
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.plan import warm_up
from evenpack.scheduler.testing import run_ranks

LENGTHS = ((9, 1, 1, 1), (2, 2, 3, 1))


def public_names() -> int:
    """Import every module, and every name that one says is public; return how many there are."""
    count = 0
    for info in pkgutil.walk_packages(evenpack.__path__, "evenpack."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        names = getattr(module, "__all__", ())
        assert all(hasattr(module, name) for name in names), info.name
        count += len(names)
    return count


def step(rank: int, num_ranks: int) -> tuple[int, list[int]]:
    """Take a step of a rank's samples; return the load and the targets of the packs."""
    samples = [{"input_ids": [1] * length} for length in LENGTHS[rank]]
    config = SchedulerConfig(max_tokens=16, samples_per_step=4)
    with PackingScheduler(samples, config=config, adapter=adapter_for("text"), groups=ProcessGroups.from_world()) as scheduler:
        (first,) = list(scheduler)
    return first.stats.num_samples, [batch.total_tokens for batch in first]


def main(folder: str) -> None:
    """Check, and say what was found."""
    assert evenpack.__file__.startswith(folder), f"{evenpack.__file__} is not what was installed into {folder}"
    warnings.simplefilter("ignore")
    count = public_names()
    warm_up()  # compiles where no cache is, which takes longer than ranks wait for each other
    found = run_ranks(step, 2)
    assert [num for num, _ in found] == [8, 8] and sum(sum(tokens) for _, tokens in found) == 20, found
    packs = [tokens for _, tokens in found]
    print(f"evenpack {evenpack.__version__}: {count} public names; 2 ranks took a step of {packs} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
