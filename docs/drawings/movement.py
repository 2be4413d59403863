"""Movement: which samples leave home, and how many bytes a tighter balance costs."""

import itertools

import msgspec
import numpy as np
from bars import LEFT
from canvas import FAINT, RANKS, SMALL, WIDTH, Canvas

from evenpack.scheduler import PlanConfig, SampleTable, StepPlan, plan_step

NUM_RANKS, PER_RANK, MAX_TOKENS = 16, 32, 16_384
TOLERANCES = (0.0, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
SHOWN = (0.01, 0.1)
#: What the loads are drawn for.
DRAWN = 0.01
LEFT_AXIS, TOP, BOTTOM = 74.0, 258.0, 440.0
LOADS_TOP, LOADS_BOTTOM = 50.0, 168.0
STAYS, ARRIVES = RANKS[0], RANKS[1]


def table_of() -> SampleTable:
    """Return 512 samples of log-normal length, rank by rank longer: 16 bytes a token, and 1,500 more in four of five."""
    rng = np.random.default_rng(0)
    home = np.repeat(np.arange(NUM_RANKS), PER_RANK)
    tokens = np.clip(np.exp(rng.normal(6.3 + 0.04 * home, 0.8)), 16, 8192).astype(np.int64)
    nbytes = 16 * tokens + np.where(rng.random(len(tokens)) < 0.8, 1500 * tokens, 0)
    return SampleTable.from_lengths(tokens, home=home, nbytes=nbytes, cost=tokens + tokens**2 // 65536)


def frontier() -> tuple[SampleTable, list[StepPlan], StepPlan]:
    """Return the samples, the plan of every tolerance, and the plan that ignores homes."""
    table, config = table_of(), PlanConfig(max_tokens=MAX_TOKENS)
    found = [plan_step(table, num_ranks=NUM_RANKS, config=msgspec.structs.replace(config, tolerance=one)) for one in TOLERANCES]
    free = plan_step(table, num_ranks=NUM_RANKS, config=msgspec.structs.replace(config, movement="free"))
    return table, found, free


def imbalance_at_home(table: SampleTable) -> float:
    """Return the largest over the mean load with every sample where it was read."""
    loads = np.bincount(table.home, weights=table.cost.astype(float), minlength=NUM_RANKS)
    return float(loads.max() / loads.mean())


def draw() -> Canvas:
    """Draw the loads of a plan, stayed and moved, and imbalance over the share of bytes that moves, for every tolerance."""
    table, found, free = frontier()
    canvas = Canvas("Samples that leave home, and what each tolerance costs in bytes", 500)
    _draw_loads(canvas, table, found[TOLERANCES.index(DRAWN)])
    _draw_frontier(canvas, table, found, free)
    return canvas


def _draw_loads(canvas: Canvas, table: SampleTable, plan: StepPlan) -> None:
    def loads(rank_of: np.ndarray, which: np.ndarray) -> np.ndarray:
        return np.bincount(rank_of[which], weights=table.cost[which].astype(float), minlength=NUM_RANKS)

    stays = table.home == plan.rank
    stay, leave, arrive = loads(table.home, stays), loads(table.home, ~stays), loads(plan.rank, ~stays)
    canvas.text(LEFT, 18, f"Load of {NUM_RANKS} ranks, at home and planned", bold=True)
    scale = (LOADS_BOTTOM - LOADS_TOP) / float((stay + leave).max())
    width = (WIDTH - LEFT_AXIS - 28) / NUM_RANKS
    for rank in range(NUM_RANKS):
        x, y = LEFT_AXIS + width * rank, LOADS_BOTTOM
        for load, fill, edge in ((stay, STAYS, STAYS), (leave, "white", STAYS)):
            high = float(load[rank]) * scale
            y -= high
            canvas.box(x + 1, y, width - 5, high, fill, edge=edge)
        high = float(arrive[rank]) * scale
        canvas.box(x + 1, LOADS_BOTTOM - float(stay[rank]) * scale - high, width - 5, high, ARRIVES, edge=ARRIVES)
    mean = LOADS_BOTTOM - float((stay + leave).mean()) * scale
    canvas.line(LEFT_AXIS - 4, mean, WIDTH - 24, mean, width=1.4)
    canvas.text(LEFT_AXIS - 8, mean, "mean", size=SMALL, at="right")
    for x, fill, edge, name in (
        (74, STAYS, STAYS, "stays home"),
        (174, "white", STAYS, "leaves"),
        (250, ARRIVES, ARRIVES, "arrives"),
    ):
        canvas.box(x, 180, 12, 12, fill, edge=edge)
        canvas.text(x + 18, 186, name, size=SMALL)


def _draw_frontier(canvas: Canvas, table: SampleTable, found: list[StepPlan], free: StepPlan) -> None:
    total = float(table.nbytes.sum())
    home = imbalance_at_home(table)
    canvas.text(LEFT, TOP - 36, "What balance costs: bytes that leave home", bold=True)

    def place(moved: float, imbalance: float) -> tuple[float, float]:
        x = LEFT_AXIS + (WIDTH - LEFT_AXIS - 28) * np.sqrt(moved / total)
        return float(x), float(BOTTOM - (BOTTOM - TOP) * (imbalance - 1) / (home - 1))

    _axes(canvas, place, total, home - 1)
    points = [place(0.0, home), *(place(plan.moved_bytes, plan.imbalance) for plan in reversed(found))]
    for start, end in itertools.pairwise(points):
        canvas.line(*start, *end, color=STAYS, width=1.6)
    for point in points:
        canvas.dot(*point, color=STAYS, size=6)
    canvas.text(points[0][0] + 10, points[0][1], "every sample at home", size=SMALL)
    for tolerance, plan in zip(TOLERANCES, found, strict=True):
        if tolerance in SHOWN:
            x, y = place(plan.moved_bytes, plan.imbalance)
            canvas.text(x + 12, y - 12, f"tolerance {tolerance:g}: {plan.moved_bytes / total:.1%} moves", size=SMALL)
    x, y = place(free.moved_bytes, free.imbalance)
    canvas.dot(x, y, color=ARRIVES, size=7)
    canvas.text(x + 8, y - 36, f'movement="free": {free.moved_bytes / total:.0%}', size=SMALL, at="right")


def _axes(canvas: Canvas, place, total: float, most_y: float) -> None:
    canvas.line(LEFT_AXIS, BOTTOM, WIDTH - 16, BOTTOM, color=FAINT)
    canvas.line(LEFT_AXIS, TOP - 8, LEFT_AXIS, BOTTOM, color=FAINT)
    for share in (0.01, 0.05, 0.2, 0.5, 1.0):
        x, _ = place(share * total, 1.0)
        canvas.line(x, BOTTOM, x, BOTTOM + 5, color=FAINT)
        canvas.text(x, BOTTOM + 15, f"{share:.0%}", size=SMALL, at="center")
    for value in np.linspace(1.0, 1 + most_y, 4):
        _, y = place(0.0, float(value))
        canvas.text(LEFT_AXIS - 8, y, f"{value:.2f}", size=SMALL, at="right")
    canvas.text(
        (LEFT_AXIS + WIDTH) / 2, BOTTOM + 36, "share of the step's bytes that moves (square-root axis)", size=SMALL, at="center"
    )
    canvas.text(LEFT_AXIS - 58, TOP - 20, "largest / mean load", size=SMALL)
