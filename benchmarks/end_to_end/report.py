"""The table of the modes, and whether the targets were met."""

import statistics
from collections.abc import Callable, Sequence

from .training import MODES, Outcome

FASTER_THAN_PADDED = 1.3
LOSS_TOLERANCE = 1e-4
BASELINE, OURS = "a", "e"
Rounds = dict[str, list[Outcome]]


def speed(outcome: Outcome) -> float:
    """Real tokens per second, over all ranks."""
    return outcome.tokens / outcome.seconds


def cpu_speed(outcome: Outcome) -> float:
    """Real tokens per second of CPU time of each step's busiest rank: other load on the machine hardly changes it."""
    return outcome.tokens / outcome.cpu_seconds


def ratios(rounds: Rounds, other: str, of: Callable[[Outcome], float] = speed) -> list[float]:
    """Return evenpack's speed over another mode's, round by round."""
    return [of(ours) / of(theirs) for ours, theirs in zip(rounds[OURS], rounds[other], strict=True)]


def noise(values: Sequence[float]) -> float:
    """Half of the range of values: how far a round lies from the middle."""
    return (max(values) - min(values)) / 2


def loss_difference(rounds: Rounds) -> float:
    """Return the largest difference of a step's loss between any two trainings."""
    curves = [outcome.losses for outcomes in rounds.values() for outcome in outcomes]
    return max(max(losses) - min(losses) for losses in zip(*curves, strict=True))


def lines(rounds: Rounds, steps: int) -> list[str]:
    """Return the table and the verdicts."""
    heads = ("tokens/s", "(rounds)", "evenpack is", "by CPU time", "padding", "passes", "peak MB", "last loss")
    out = [_row("", heads), *(_row(f"({letter}) {MODES[letter].title}", _cells(rounds, letter, steps)) for letter in rounds)]
    out.append("evenpack is: its tokens/s over this row's, median of the rounds")
    out.append("by CPU time: the same with the CPU time of each step's busiest rank, which hardly depends on other load")
    out.append("padding: share of the computed tokens; passes: forward passes of rank 0 per step")
    first = rounds[BASELINE][0]
    out.append(f"timed: {steps} steps of {first.tokens / steps:.0f} real tokens each")
    return out + verdicts(rounds)


def _row(name: str, cells: Sequence[str]) -> str:
    widths = (8, 28, 11, 11, 7, 6, 7, 9)
    return f"{name:45}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cells(rounds: Rounds, letter: str, steps: int) -> list[str]:
    outcomes = rounds[letter]
    one, speeds = outcomes[0], [speed(outcome) for outcome in outcomes]
    return [
        f"{statistics.median(speeds):.0f}",
        f"({', '.join(f'{value:.0f}' for value in speeds)})",
        f"{statistics.median(ratios(rounds, letter)):.2f} x",
        f"{statistics.median(ratios(rounds, letter, cpu_speed)):.2f} x",
        f"{1 - one.tokens / one.computed:.1%}",
        f"{one.num_microbatches / steps:.1f}",
        f"{max(outcome.peak_bytes for outcome in outcomes) / 1e6:.0f}",
        f"{one.losses[-1]:.6f}",
    ]


def verdicts(rounds: Rounds) -> list[str]:
    """Return one line per target: what it is, what was measured, whether it was met."""
    times = ratios(rounds, BASELINE)
    text = f"evenpack / ({BASELINE}): {_spread(times)}, at least {FASTER_THAN_PADDED}"
    found = [(statistics.median(times) >= FASTER_THAN_PADDED, text)]
    for letter in rounds:
        if letter in "bcd":
            times = ratios(rounds, letter)
            text = f"evenpack / ({letter}): {_spread(times)}, not below 1 by more than the spread"
            found.append((statistics.median(times) >= 1 - noise(times), text))
    gap = loss_difference(rounds)
    found.append((gap <= LOSS_TOLERANCE, f"losses of every step agree: largest difference {gap:.1e}, at most {LOSS_TOLERANCE}"))
    return [f"{'pass' if met else 'MISS'}  {text}" for met, text in found]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} +- {noise(values):.2f}"
