"""A report as a page."""

from ..page import Curve, DrawnStep, PageData, RunView, Table
from .reading import Report
from .result import SLOW_HEADER, facts, replay_lines, rows, slow_rows


def as_page(reports: list[Report]) -> PageData:
    """Return reports, read with what a page draws, as a page."""
    names = tuple(report.name for report in reports)
    compared = Table(
        title="The run" if len(reports) == 1 else "The runs",
        header=("", *names, *(("change",) if len(reports) == 2 else ())),
        rows=tuple(rows(reports)),
    )
    summary = [line for report in reports for line in (*facts(report), *report.notes, *filter(None, replay_lines(report)))]
    return PageData(
        title=f"evenpack report: {' and '.join(names)}",
        summary=tuple(summary),
        tables=(compared,),
        runs=tuple(_view(report) for report in reports),
    )


def _view(report: Report) -> RunView:
    pictures = report.pictures
    assert pictures is not None, "read with pictures"
    last, tables = pictures.last, []
    if report.slowest:
        tables.append(Table(title="Slowest steps", header=SLOW_HEADER, rows=tuple(slow_rows(report))))
    if report.advice:
        lines = tuple((advice.kind, f"{advice.gain:.1%}") for advice in report.advice)
        notes = tuple(advice.text for advice in report.advice)
        tables.append(Table(title="What another setting would save", header=("setting", "time"), rows=lines, notes=notes))
    return RunView(
        name=report.name,
        tables=tuple(tables),
        curves=(
            Curve(name="as planned", values=pictures.efficiency, steps=pictures.steps),
            Curve(name="had samples stayed at home", values=pictures.efficiency_home, steps=pictures.steps),
        ),
        load_before=pictures.load_home,
        load_after=pictures.load,
        load_title="Load of each rank, over the run",
        drawn=DrawnStep(
            title=f"Step {last.stats.step}, pack by pack",
            table=last.table,
            plan=last.plan,
            config=last.header.config,
            cp_size=last.header.cp_size,
        ),
        lengths=pictures.lengths,
    )
