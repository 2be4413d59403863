"""The answer of `evenpack plan`: as plain data, as text, and as a page."""

from typing import Any

import msgspec
import numpy as np

from ...scheduler.telemetry.advice import Advice
from ..page import Curve, DrawnStep, PageData, RunView, Table
from .pool import Fitted
from .simulate import OURS, WORTH, Figures, Setting, Simulation

_HEADER = ("", "step cost", "vs evenpack", "efficiency", "above bound", "padding", "imbalance", "micro-batches", "moved a step")


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything that was found.

    Attributes:
        fitted: the samples.
        setting: what was simulated.
        cp_size: GPUs that share a pack.
        simulation: the figures.
        advice: settings that would gain, the best first; None if none was tried.
        asked_tokens: `max_tokens` as it was given, before it was rounded to whole segments.
    """

    fitted: Fitted
    setting: Setting
    cp_size: int
    simulation: Simulation
    advice: list[Advice] | None
    asked_tokens: int


def as_dict(answer: Answer) -> dict[str, Any]:
    """Return the answer as plain data, for JSON."""
    pool, setting = answer.fitted.pool, answer.setting
    config = setting.config
    unit = pool.cost_of.model.unit
    methods = []
    for figures in answer.simulation.figures.values():
        entry = msgspec.to_builtins(figures)
        entry["efficiency"] = figures.mean_efficiency
        entry["relative_cost"] = figures.step_cost / answer.simulation.figures[OURS].step_cost
        entry["step_operations"] = figures.step_cost * unit
        methods.append(entry)
    return {
        "samples": {
            "source": pool.samples.source,
            "count": len(pool),
            "dropped": answer.fitted.num_dropped,
            "truncated": answer.fitted.num_truncated,
            "length": dict(zip(("median", "p90", "p99", "longest"), _percentiles(answer), strict=True)),
            "notes": list(pool.samples.notes),
        },
        "setting": {
            "ranks": setting.num_ranks,
            "samples_per_step": setting.samples_per_step,
            "max_tokens": config.max_tokens // answer.cp_size,
            "cp_size": answer.cp_size,
            "sync": config.sync,
            "movement": config.movement,
            "tolerance": config.tolerance,
            "microbatch_cost": config.microbatch_cost,
            "align": config.align or 1,
            "oversize": config.oversize,
            "steps": setting.steps,
            "seed": setting.seed,
            "lookahead": setting.lookahead,
            "model": pool.cost_of.name,
            "operations_per_unit": unit,
        },
        "methods": methods,
        "advice": msgspec.to_builtins(answer.advice or []),
    }


def as_text(answer: Answer) -> str:
    """Return the answer as lines for a terminal."""
    rows = [_HEADER, *(_cells(one, answer) for one in answer.simulation.figures.values())]
    return "\n".join([*facts(answer), "", *aligned(rows), *_footnotes(answer), "", *_advice_lines(answer)])


def as_page(answer: Answer) -> PageData:
    """Return the answer as a page."""
    pool, setting, simulation = answer.fitted.pool, answer.setting, answer.simulation
    table, plan = simulation.tables[0], simulation.plans[0]
    weight = table.cost.reshape(len(table), -1).sum(axis=1)
    before = np.bincount(table.home, weight, minlength=setting.num_ranks)
    drawn = DrawnStep(
        title="A step, pack by pack",
        table=table,
        plan=plan,
        config=setting.config,
        ids=[int(row) for row in pool.row[simulation.rows]],
    )
    compared = Table(
        title="Beside other ways to batch",
        header=("method", *_HEADER[1:]),
        rows=tuple(_cells(one, answer) for one in simulation.figures.values()),
        notes=(_NOTE, *_footnotes(answer)),
    )
    advice = Table(
        title="Settings that would gain",
        header=("setting", "why", "time for the same work"),
        rows=tuple((one.kind, one.text, f"{-one.gain:+.1%}") for one in answer.advice or ()),
        notes=() if answer.advice else tuple(_advice_lines(answer)),
    )
    run = RunView(
        name="The simulated steps",
        curves=tuple(Curve(name=one.name, values=one.efficiency) for one in simulation.figures.values()),
        load_before=before,
        load_after=plan.cost.sum(axis=(1, 2)),
        load_title="Load of each rank, in the first step",
        drawn=drawn,
        lengths=pool.tokens,
    )
    tables = (compared, advice) if answer.advice is not None else (compared,)
    return PageData(title=f"evenpack plan: {pool.samples.source}", summary=tuple(facts(answer)), tables=tables, runs=(run,))


_NOTE = (
    "Step cost: operations that the slowest rank does, or waits for. Efficiency: share of the ranks' time that is work. "
    "Above bound: over what no plan of the same steps can go below. "
    "Padding: share of the computed tokens. Imbalance: time of a step over the mean load. Moved: what crosses ranks."
)


def facts(answer: Answer) -> list[str]:
    """Return what was planned, in sentences."""
    pool, setting, config = answer.fitted.pool, answer.setting, answer.setting.config
    median, most, nearly, longest = _percentiles(answer)
    shared = f", {answer.cp_size} GPUs a pack" if answer.cp_size > 1 else ""
    max_tokens = config.max_tokens // answer.cp_size
    if max_tokens != answer.asked_tokens:
        shared += f" ({answer.asked_tokens:,} rounded down: segments are padded to multiples of {config.align or 1})"
    means = f"means over {setting.steps} steps" if setting.steps > 1 else "figures of one step"
    lines = _left_out(answer)
    lines += [
        f"{len(pool):,} samples of {pool.samples.source}: median {median:,} tokens, 90% {most:,}, 99% {nearly:,}, "
        f"longest {longest:,}",
        f"{setting.num_ranks:,} ranks x {setting.samples_per_step:,} samples a step, max_tokens "
        f"{max_tokens:,}{shared}, sync {config.sync!r}, cost of {pool.cost_of.name}; {means}, seed {setting.seed}",
    ]
    return lines + list(pool.samples.notes)


def _left_out(answer: Answer) -> list[str]:
    """Return what was dropped or cut, which decides what all other figures are about."""
    fitted = answer.fitted
    count = fitted.num_dropped or fitted.num_truncated
    if not count:
        return []
    total = fitted.num_dropped + len(fitted.pool)
    done = "left out" if fitted.num_dropped else "cut to it"
    most = f"MOST SAMPLES ARE {'LEFT OUT' if fitted.num_dropped else 'CUT'}: " if 2 * count > total else ""
    rest = "all figures are those of the rest" if fitted.num_dropped else "all figures are those of what is left of them"
    return [
        f"{most}{count:,} of {total:,} samples ({fitted.share_above:.1%}) are longer than a pack of --max-tokens "
        f"{answer.asked_tokens:,} and {done} (oversize {answer.setting.config.oversize!r}): {rest}. The scheduler's own "
        "default, 'error', stops at the first"
    ]


def _footnotes(answer: Answer) -> list[str]:
    """Return why another method comes out ahead, where it is by less than the tolerance that is worth no move."""
    config, ours = answer.setting.config, answer.simulation.figures[OURS]
    if config.movement != "minimal":
        return []
    ahead = [
        one
        for one in answer.simulation.figures.values()
        if one.step_cost < ours.step_cost <= one.step_cost * (1 + config.tolerance) and one.moved_share > ours.moved_share
    ]
    return [
        f"{one.name} is ahead by less than --tolerance {config.tolerance:.3g} ({config.tolerance:.2%}), which evenpack "
        f"holds for worth no move: it moves {ours.moved_share:.0%} of the bytes instead of {one.moved_share:.0%}."
        for one in ahead
    ]


def _cells(figures: Figures, answer: Answer) -> tuple[str, ...]:
    """Return one row of the table."""
    ours = answer.simulation.figures[OURS].step_cost
    return (
        figures.name,
        scaled(figures.step_cost * answer.fitted.pool.cost_of.model.unit, "FLOP"),
        f"x {figures.step_cost / ours:.3f}",
        f"{figures.mean_efficiency:.1%}",
        f"{figures.above_bound:.2%}",
        f"{figures.padding_share:.1%}",
        f"{figures.imbalance:.3f}",
        f"{figures.num_microbatches:.1f}",
        f"{scaled(figures.moved_bytes, 'B')} ({figures.moved_share:.0%})",
    )


def _advice_lines(answer: Answer) -> list[str]:
    """Return which settings would gain, in sentences."""
    if answer.advice is None:
        return ["No other setting was tried."]
    if not answer.advice:
        return [f"No other setting gains more than {WORTH:.0%}."]
    return ["What would gain, in time per unit of work:", *(f"  {-one.gain:+.1%}  {one.text}" for one in answer.advice)]


def aligned(cells: list[tuple[str, ...]]) -> list[str]:
    """Return rows of text in columns, the first set to the left."""
    widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]


def scaled(value: float, unit: str) -> str:
    """Return a value with three digits and a prefix.

    Example:
        >>> scaled(12_345_678, "B"), scaled(0, "B")
        ('12.3 MB', '0 B')
    """
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}" if value / factor < 999.5 else f"{value / factor:.0f} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _percentiles(answer: Answer) -> list[int]:
    return [int(value) for value in np.percentile(answer.fitted.pool.tokens, (50, 90, 99, 100))]
