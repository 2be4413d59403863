"""Ranks as rows of bars over time: what each computes, micro-batch by micro-batch, and where it waits."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from canvas import FAINT, INK, RANKS, SMALL, WAIT, WIDTH, Canvas

from evenpack.scheduler import SampleTable, StepPlan

LEFT, RIGHT, ROW, GAP = 62.0, 12.0, 20.0, 5.0
Wait = Literal["step", "microbatch"]


def finish_times(plan: StepPlan, wait: Wait) -> tuple[np.ndarray, np.ndarray]:
    """Return when every pack begins, `[R, M]`, and when ranks meet, `[M]` or `[1]`, in units of cost."""
    cost = plan.cost.sum(axis=2)
    if wait == "step":
        return np.cumsum(cost, axis=1) - cost, np.array([cost.sum(axis=1).max()])
    meets = np.cumsum(cost.max(axis=0))
    return np.broadcast_to(meets - cost.max(axis=0), cost.shape), meets


def draw_plan(canvas: Canvas, top: float, table: SampleTable, plan: StepPlan, wait: Wait, longest: int) -> float:
    """Draw one plan, samples in the colour of their home; return the y below it.

    Args:
        canvas: to draw on.
        top: y of the first rank.
        table: the samples.
        plan: where they went.
        wait: where ranks wait.
        longest: cost that the page's width stands for.
    """
    scale = (WIDTH - LEFT - RIGHT) / longest
    begins, meets = finish_times(plan, wait)
    cost = table.cost.sum(axis=1) if table.cost.ndim == 2 else table.cost
    for rank in range(plan.num_ranks):
        y = top + rank * (ROW + GAP)
        canvas.text(LEFT - 6, y + ROW / 2, f"rank {rank}", at="right")
        canvas.box(LEFT, y, float(meets[-1]) * scale, ROW, WAIT, edge=WAIT, hatch="////")
        for microbatch in range(plan.num_microbatches):
            x = LEFT + float(begins[rank, microbatch]) * scale
            for row in plan.ids(rank, microbatch).tolist():
                canvas.box(x, y, float(cost[row]) * scale, ROW, RANKS[int(table.home[row])])
                x += float(cost[row]) * scale
            if microbatch:
                edge = LEFT + float(begins[rank, microbatch]) * scale
                canvas.line(edge, y - 1, edge, y + ROW + 1, width=1.8)
    bottom = top + plan.num_ranks * (ROW + GAP)
    for meet in meets.tolist():
        canvas.line(LEFT + meet * scale, top - 3, LEFT + meet * scale, bottom - 2, color=FAINT)
    return bottom


def legend(canvas: Canvas, y: float, num_ranks: int, words: Sequence[str] = ()) -> None:
    """Explain the colours in one line, and write further lines below."""
    canvas.text(LEFT, y, "read by rank", size=SMALL)
    for rank in range(num_ranks):
        canvas.box(LEFT + 78 + 34 * rank, y - 6, 12, 12, RANKS[rank])
        canvas.text(LEFT + 94 + 34 * rank, y, str(rank), size=SMALL)
    x = LEFT + 88 + 34 * num_ranks
    canvas.box(x, y - 6, 18, 12, WAIT, edge=WAIT, hatch="////")
    canvas.text(x + 24, y, "waits", size=SMALL)
    for index, line in enumerate(words):
        canvas.text(LEFT, y + 18 * (index + 1), line, size=SMALL, color=INK)


def waiting(plan: StepPlan, wait: Wait) -> float:
    """Return the share of the group's time that is waiting."""
    return 1 - float(plan.cost.sum()) / (plan.num_ranks * float(finish_times(plan, wait)[1][-1]))
