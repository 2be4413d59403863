"""The two sync points: the same samples planned for ranks that wait once a step, and in every micro-batch."""

import msgspec
from bars import LEFT, draw_plan, finish_times, legend, waiting
from canvas import Canvas
from samples import CONFIG, NUM_RANKS, table_of

from evenpack.scheduler import SampleTable, StepPlan, plan_step


def plans() -> tuple[SampleTable, StepPlan, StepPlan]:
    """Return the samples, their plan for `sync="step"` and that for `sync="microbatch"`."""
    table = table_of()
    for_step = plan_step(table, num_ranks=NUM_RANKS, config=CONFIG)
    for_microbatch = plan_step(table, num_ranks=NUM_RANKS, config=msgspec.structs.replace(CONFIG, sync="microbatch"))
    return table, for_step, for_microbatch


def draw() -> Canvas:
    """Draw the step plan at both sync points, and the micro-batch plan at its own."""
    table, for_step, for_microbatch = plans()
    panels = (
        ('sync="step", run by DDP', for_step, "step"),
        ("The same plan, run by FSDP", for_step, "microbatch"),
        ('sync="microbatch", run by FSDP', for_microbatch, "microbatch"),
    )
    longest = max(int(finish_times(plan, wait)[1][-1]) for _, plan, wait in panels)
    canvas, bottom = Canvas("The same samples, planned for either sync point", 478), 0.0
    for name, plan, wait in panels:
        canvas.text(LEFT, bottom + 18, f"{name}: {waiting(plan, wait):.0%} waiting", bold=True)
        bottom = draw_plan(canvas, bottom + 36, table, plan, wait, longest) + 4
    legend(canvas, bottom + 12, NUM_RANKS, ["At a grey line all ranks wait for each other."])
    return canvas
