"""The flow of one step: its stages run once, in order, and a text sample passes few modules."""

import sys
import threading

from .helpers import open_scheduler, text_sample

#: The planner counts as one. `core` is left out: errors, fields and rounding are in use everywhere.
MOST_MODULES = 20
STAGES = ("collect", "describe", "gather", "select", "planning", "exchange")


def called_functions(fn):
    """Return what evenpack runs in `fn`, in any thread that starts there, as "module:function", in the order of first calls."""
    found: dict[str, None] = {}

    def profile(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("evenpack."):
            found[f"{name.removeprefix('evenpack.')}:{frame.f_code.co_qualname}"] = None

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


def test_a_text_sample_that_stays_home_passes_few_modules():
    source = [text_sample(length, index) for index, length in enumerate((5, 3, 2, 6))]
    with open_scheduler(source, samples_per_step=4) as scheduler:
        found = called_functions(lambda: next(scheduler)[0])
    modules = dict.fromkeys(name.partition(":")[0] for name in found)
    planner = {name for name in modules if name.startswith("scheduler.plan.") or name == "scheduler.stages.planning"}
    others = [name for name in modules if name not in planner and not name.startswith("core.")]
    assert planner and "collate.packs.pack" in others
    assert len(others) + 1 <= MOST_MODULES, others
    calls = ("Reader.collect", "Describer.__call__", "Gatherer.__call__", "select", "plan_samples", "Exchanger.__call__")
    at = [found.index(f"scheduler.stages.{stage}:{call}") for stage, call in zip(STAGES, calls, strict=True)]
    assert at == sorted(at)
