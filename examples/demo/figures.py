"""The demo's two pictures: the loss, and the ranks' loads before and after."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .progress import StepRecord

#: Steps that the picture of the loads shows; more become too thin to see.
NUM_STEPS_SHOWN = 12
#: Share of the last value in the smoothed loss.
SMOOTHING = 0.85

_INK, _MUTED, _GRID = "#1f2933", "#52606d", "#e4e7eb"
_BUSY = ("#1f6f8b", "#4f9db8")
_WAITING = "#f2b8a0"
_DPI = 150


def draw_loss(records: Sequence[StepRecord], accuracy: float, chance: float, file: Path) -> None:
    """Write the loss of every step, and its moving average."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    steps = [record.step for record in records]
    axes.plot(steps, [record.loss for record in records], color=_BUSY[1], alpha=0.45, linewidth=1, label="each step")
    axes.plot(steps, _smoothed([record.loss for record in records]), color=_BUSY[0], linewidth=2.2, label="moving average")
    axes.set_xlabel("optimizer step", color=_MUTED)
    axes.set_ylabel("loss per target token", color=_MUTED)
    axes.set_xlim(left=1, right=max(steps[-1], 2))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID)
    axes.legend(frameon=False, labelcolor=_INK)
    title = f"Held-out digits: {accuracy:.0%} right after {len(records)} steps (chance: {chance:.0%})"
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    _tidy(axes)
    figure.savefig(file, dpi=_DPI)


def draw_loads(records: Sequence[StepRecord], file: Path) -> None:
    """Write a timeline of the ranks over some steps: at work, and waiting for the slowest of the step."""
    shown = records[:NUM_STEPS_SHOWN]
    num_ranks = len(shown[0].loads)
    # One unit of time is the mean step, its work spread evenly: the best that any schedule could do.
    unit = sum(sum(record.loads_home) for record in shown) / len(shown) / num_ranks
    figure = Figure(figsize=(10, 2.6 + 0.64 * num_ranks), layout="constrained")
    before, after = figure.subplots(2, 1, sharex=True)
    end = _draw_lanes(before, [[load / unit for load in record.loads_home] for record in shown])
    end_after = _draw_lanes(after, [[load / unit for load in record.loads] for record in shown])
    for axes, name, stop in ((before, "Every sample stays where it was read", end), (after, "With evenpack", end_after)):
        waiting = 1 - len(shown) / stop
        axes.set_title(f"{name}: ranks wait {waiting:.0%} of the time", loc="left", color=_INK, fontweight="bold")
    after.axvline(end_after, color=_INK, linewidth=1)
    if end - end_after > 0.08 * end:
        text = f"done {1 - end_after / end:.0%} sooner"
        after.text(end_after + 0.01 * end, (num_ranks - 1) / 2, text, va="center", color=_INK, fontsize=10)
    after.set_xlim(0, max(end, end_after) * 1.005)
    after.xaxis.set_major_locator(MaxNLocator(integer=True))
    after.set_xlabel("modelled time, in steps of perfect balance", color=_MUTED)
    handles = [Patch(color=_BUSY[0], label="at work (steps alternate in shade)"), Patch(color=_WAITING, label="waiting")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False, labelcolor=_INK)
    figure.savefig(file, dpi=_DPI)


def _draw_lanes(axes: Axes, steps: Sequence[Sequence[float]]) -> float:
    """Draw one lane per rank, a step beginning when every rank has finished the one before; return where the last ends."""
    start = 0.0
    for number, loads in enumerate(steps):
        for rank, load in enumerate(loads):
            axes.barh(rank, load, left=start, height=0.72, color=_BUSY[number % 2], edgecolor="white", linewidth=0.6)
            axes.barh(rank, max(loads) - load, left=start + load, height=0.72, color=_WAITING)
        start += max(loads)
    ranks = range(len(steps[0]))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], color=_INK)
    axes.invert_yaxis()
    _tidy(axes)
    axes.tick_params(axis="y", length=0)
    return start


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return a moving average that does not lag behind at the start."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1
        out.append(total / weight)
    return out


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_MUTED, length=3)
    axes.set_axisbelow(True)
