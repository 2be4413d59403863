"""A report as plain data, and as text."""

from typing import Any

import msgspec

from ...scheduler.telemetry.summary import Summary
from ..what_if.result import aligned, scaled
from .reading import MOST_LISTED, Report

#: (figure, what it is called, how it is written); bytes and seconds get prefixes, shares are in percent.
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("steps", "steps", "count"),
    ("samples", "samples", "count"),
    ("tokens", "tokens", "count"),
    ("tokens_per_second", "tokens/s", "count"),
    ("step_seconds", "seconds a step", "seconds"),
    ("exposed_seconds", "waited for the scheduler", "seconds"),
    ("exposed_share", "  share, first steps of epochs aside", "share"),
    ("prepare_seconds", "preparing a step", "seconds"),
    ("padding_share", "padding", "share"),
    ("padding_share_batched", "  in padded batches", "share"),
    ("num_microbatches", "micro-batches a step", "ratio"),
    ("efficiency", "efficiency, as planned", "share"),
    ("lost_to_step", "  lost to the steps' samples", "share"),
    ("lost_to_window", "    which longer windows gain", "share"),
    ("lost_to_plan", "  lost to the plans", "share"),
    ("imbalance", "imbalance", "ratio"),
    ("imbalance_home", "  had samples stayed at home", "ratio"),
    ("bubble", "bubble", "share"),
    ("gap_to_bound", "gap to bound", "share"),
    ("moved_bytes", "moved", "bytes"),
    ("moved_share", "  of a full shuffle", "share"),
    ("moved_bytes_lower_bound", "  bound for such plans", "bytes"),
    ("num_carried", "samples carried in windows", "ratio"),
    ("longest_delay", "  longest delay, in steps", "count"),
    ("mean_delay", "  mean distance from their turn", "ratio"),
    ("tokens_over_mean", "  largest step over the mean", "ratio"),
    ("num_dropped", "dropped samples", "count"),
    ("num_truncated", "cut samples", "count"),
)


def as_dict(reports: list[Report]) -> dict[str, Any]:
    """Return reports as plain data, for JSON; for two, with the second's change against the first."""
    runs = []
    for report in reports:
        header = msgspec.to_builtins(report.header)
        del header["stats_fields"]
        runs.append(
            {
                "run": report.name,
                "first_step": report.first_step,
                "last_step": report.last_step,
                "not_recorded": report.num_missing,
                "bytes_per_sample": report.num_bytes / max(1, report.summary.samples),
                "settings": header,
                "varying": {
                    name: [{"from_step": step, "value": value} for step, value in values]
                    for name, values in report.varying.items()
                },
                "summary": report.summary.as_dict(),
                "slowest": msgspec.to_builtins(report.slowest),
                "advice": msgspec.to_builtins(report.advice),
                "replayed": report.replayed,
                "differing": [{"step": step, "differences": lines} for step, lines in report.differing],
                "notes": report.notes,
            }
        )
    shown: dict[str, Any] = {"runs": runs}
    if len(reports) == 2:
        shown["change"] = {name: change(name, reports[0].summary, reports[1].summary) for name, _, _ in _ROWS}
    return shown


def change(name: str, first: Summary, second: Summary) -> float | None:
    """Return the relative change of a figure, of a share the difference; None where there is none to tell."""
    was, now = getattr(first, name), getattr(second, name)
    if was is None or now is None:
        return None
    if _KINDS[name] == "share":
        return float(now - was)
    return float(now / was - 1) if was else (0.0 if not now else None)


_KINDS = {name: kind for name, _, kind in _ROWS}


def as_text(reports: list[Report]) -> str:
    """Return reports as lines for a terminal."""
    lines = [fact for report in reports for fact in facts(report)]
    header = ("", *(report.name for report in reports), *(("change",) if len(reports) == 2 else ()))
    lines += ["", *aligned([header, *rows(reports)])]
    for report in reports:
        named = f" of {report.name}" if len(reports) == 2 else ""
        if report.slowest:
            lines += ["", f"slowest steps{named}", *aligned([SLOW_HEADER, *slow_rows(report)])]
        for advice in report.advice:
            lines += ["", f"advice{named}: {advice.text}"]
        lines += replay_lines(report)
    return "\n".join(lines)


def facts(report: Report) -> list[str]:
    """Return what the run was, in sentences."""
    header, config = report.header, report.header.config

    def fact(name: str, value: int) -> str:
        return f"{name} {'varies' if name in report.varying else f'{value:,}'}"

    per_step = fact("samples_per_step", config.samples_per_step) if config.samples_per_step else ""
    if config.tokens_per_step:
        per_step = fact("tokens_per_step", config.tokens_per_step)
    if config.scope != "group":
        per_step += f"{', ' if per_step else ''}scope {config.scope!r}"
    lines = [
        f"{report.name}: steps {report.first_step} to {report.last_step}, {header.num_ranks} ranks, "
        f"{fact('max_tokens', config.max_tokens)}, {per_step}, sync {config.sync!r}, evenpack {header.version}"
    ]
    for name, values in report.varying.items():
        listed = [str(values[0][1]), *(f"{value} from step {step:,} on" for step, value in values[1:])]
        if len(listed) > MOST_LISTED:
            listed = [*listed[: MOST_LISTED - 2], f"{len(listed) - MOST_LISTED + 1:,} more", listed[-1]]
        lines.append(f"{report.name}: {name} varies: {', '.join(listed)}")
    if report.num_missing:
        lines.append(f"{report.name}: {report.num_missing:,} steps between those were not recorded")
    return lines


def rows(reports: list[Report]) -> list[tuple[str, ...]]:
    """Return the figures, a cell for each run, and one for the change between two."""
    found = []
    for name, label, kind in _ROWS:
        cells = [written(getattr(report.summary, name), kind) for report in reports]
        if len(reports) == 2:
            cells.append(_written_change(name, reports[0].summary, reports[1].summary))
        found.append((label, *cells))
    return found


SLOW_HEADER = ("step", "seconds", "waited", "tokens", "imbalance")


def slow_rows(report: Report) -> list[tuple[str, ...]]:
    """Return the slowest steps."""
    return [
        (
            str(one.step), written(one.seconds, "seconds"), written(one.exposed_seconds, "seconds"), f"{one.tokens:,}",
            f"{one.imbalance:.3f}",
        )
        for one in report.slowest
    ]  # fmt: skip


def replay_lines(report: Report) -> list[str]:
    """Return how the replay went."""
    if report.replayed is None:
        return []
    same = report.replayed - len(report.differing)
    lines = ["", f"replay of {report.name}: {same:,} of {report.replayed:,} steps come out exactly as they ran"]
    lines += [f"  step {step}: {'; '.join(differences)}" for step, differences in report.differing[:MOST_LISTED]]
    if len(report.differing) > MOST_LISTED:
        lines.append(f"  and {len(report.differing) - MOST_LISTED:,} more")
    return lines


def written(value: float | None, kind: str) -> str:
    """Return a figure as text.

    Example:
        >>> written(0.1234, "share"), written(None, "count"), written(2_500_000, "bytes"), written(0.0123, "seconds")
        ('12.3%', '-', '2.5 MB', '12.3 ms')
    """
    if value is None:
        return "-"
    if kind == "share":
        return f"{value:.1%}" if abs(value) >= 0.1 else f"{value:.2%}"
    if kind == "bytes":
        return scaled(value, "B")
    if kind == "seconds":
        return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    return f"{value:,.0f}" if kind == "count" else f"{value:.3f}"


def _written_change(name: str, first: Summary, second: Summary) -> str:
    """Return the change of a figure as text; shares differ in points."""
    found = change(name, first, second)
    if found is None:
        return "-"
    return f"{found * 100:+.2f} pt" if _KINDS[name] == "share" else f"{found:+.1%}"
