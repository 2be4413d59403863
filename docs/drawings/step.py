"""A step: R ranks x M packs, every rank packing alone, and planned over the group."""

import numpy as np
from bars import GAP, LEFT, RIGHT, ROW, draw_plan, legend, waiting
from canvas import FAINT, RANKS, WAIT, WIDTH, Canvas
from samples import CONFIG, NUM_RANKS, alone, table_of

from evenpack.scheduler import plan_step


def draw() -> Canvas:
    """Draw both, to the same scale of time."""
    table = table_of()
    own = alone(table)
    plan = plan_step(table, num_ranks=NUM_RANKS, config=CONFIG)
    sums = [int(one.cost.sum()) for one in own]
    longest = max(sums)
    canvas = Canvas("A step of four ranks: packed alone, and planned over the group", 318)
    share = 1 - sum(sums) / (NUM_RANKS * longest)
    canvas.text(LEFT, 16, f"Every rank packs what it has read: {share:.0%} waiting", bold=True)
    bottom = _alone(canvas, 32, table, own, longest)
    canvas.text(
        LEFT, bottom + 22, f"evenpack: {waiting(plan, 'step'):.0%} waiting, {plan.num_microbatches} packs a rank", bold=True
    )
    bottom = draw_plan(canvas, bottom + 38, table, plan, "step", longest)
    legend(canvas, bottom + 16, NUM_RANKS, ["A box is a sample, as wide as it is costly; a thick line ends a pack."])
    return canvas


def _alone(canvas: Canvas, top: float, table, plans, longest: int) -> float:
    scale = (WIDTH - LEFT - RIGHT) / longest
    for rank, plan in enumerate(plans):
        x, y = LEFT, top + rank * (ROW + GAP)
        rows = np.flatnonzero(table.home == rank)
        canvas.text(LEFT - 6, y + ROW / 2, f"rank {rank}", at="right")
        canvas.box(LEFT, y, WIDTH - LEFT - RIGHT, ROW, WAIT, edge=WAIT, hatch="////")
        for microbatch in range(plan.num_microbatches):
            if microbatch:
                canvas.line(x, y - 1, x, y + ROW + 1, width=1.8)
            for row in plan.ids(0, microbatch).tolist():
                width = float(table.cost[rows[row]]) * scale
                canvas.box(x, y, width, ROW, RANKS[rank])
                x += width
    bottom = top + len(plans) * (ROW + GAP)
    canvas.line(WIDTH - RIGHT, top - 3, WIDTH - RIGHT, bottom - 2, color=FAINT)
    return bottom
