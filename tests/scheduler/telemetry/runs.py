"""Runs of simulated ranks, recorded."""

from evenpack.scheduler import PackingScheduler, ProcessGroups, RunLog, SchedulerConfig, read_run
from evenpack.scheduler.telemetry.run_log.store import StepWriter
from evenpack.scheduler.testing import run_ranks

from ..helpers import TEXT, VISION, mixed_source, random_source


def record(folder, num_ranks=3, count=14, images=False, callbacks=(), log=None, **settings):
    """Run one epoch and record it; return what rank 0 had: every step's figures, table and plan."""
    settings = {"max_tokens": 128, "timeout": 20.0, **settings}
    if not {"samples_per_step", "tokens_per_step"} & set(settings):
        settings["samples_per_step"] = 4
    source = mixed_source if images else random_source

    def fn(rank, num_ranks):
        told = [RunLog(folder, **(log or {})), *(make() for make in callbacks)]
        with PackingScheduler(
            source(rank, count), config=SchedulerConfig(**settings), adapter=VISION if images else TEXT,
            groups=ProcessGroups.from_world(), callbacks=told,
        ) as scheduler:  # fmt: skip
            return [(step.stats, step.table, step.plan) for step in scheduler]

    return run_ranks(fn, num_ranks)[0]


def record_ramp(folder, sizes):
    """Record two steps of each size on one rank, as Megatron-Core's batch grows: each with a scheduler that goes on."""
    log, state, ran = RunLog(folder), None, []
    for size in sizes:
        config = SchedulerConfig(max_tokens=128, samples_per_step=size)
        with PackingScheduler(random_source(0, 200), config=config, adapter=TEXT, callbacks=[log.__call__]) as scheduler:
            if state is not None:
                scheduler.load_state_dict(state)
            for _ in range(2):
                step = next(scheduler)
                ran.append((step.stats, step.table, step.plan))
            state = scheduler.state_dict()
    log.close()
    return ran


def rewrite(folder, target, change):
    """Write a recorded run anew, each step's figures as `change(stats)` returns them; None leaves the step out."""
    steps = list(read_run(folder))
    target.mkdir()
    changed = [(change(step.stats), step.table, step.plan, step.header) for step in steps]
    writer = StepWriter(target, steps[0].header)
    writer.write([step for step in changed if step[0] is not None])
    writer.close()
