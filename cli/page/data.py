"""What the page shows, as plain data: whoever fills these structs needs to know nothing of plots."""

from collections.abc import Sequence

import msgspec
import numpy.typing as npt

from ...scheduler.plan import PlanConfig, SampleTable, StepPlan


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of text.

    Attributes:
        title: heading above it.
        header: names of the columns.
        rows: cells, one per column; the first column is set to the left, the others to the right.
        notes: sentences below it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


class Curve(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One line over the steps.

    Attributes:
        name: in the legend.
        values: `[S]`, one per step; drawn as means of neighbours where there are very many.
        steps: `[S]`, numbers of the steps, ascending; the line is broken where one is missing. None for 0 to S - 1.
    """

    name: str
    values: npt.ArrayLike
    steps: npt.ArrayLike | None = None


class DrawnStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One step, drawn with its packs and segments.

    Attributes:
        title: which step it is.
        table: its samples; a sample is called by its row, or by `ids`.
        plan: its plan.
        config: the settings it was planned with.
        cp_size: context-parallel size.
        ids: name of each sample, or None.
    """

    title: str
    table: SampleTable
    plan: StepPlan
    config: PlanConfig
    cp_size: int = 1
    ids: Sequence[str | int] | None = None


class RunView(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is shown of one run (or one simulation): a column of the page.

    Attributes:
        name: heading of the column.
        facts: short sentences below the heading.
        tables: comparisons, figures.
        curves: efficiency over the steps: the share of the ranks' time that is work, from 0 to 1 (`1 / imbalance`).
        load_before: `[R]`, load of each rank had every sample stayed where it was read, in any unit; None to leave it out.
        load_after: `[R]`, load of each rank as planned, in the same unit.
        load_title: which step or steps the loads are of.
        drawn: one step with its packs, or None.
        lengths: `[N]`, tokens of the samples, for the histogram; empty to leave it out.
    """

    name: str
    facts: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    curves: tuple[Curve, ...] = ()
    load_before: npt.ArrayLike | None = None
    load_after: npt.ArrayLike | None = None
    load_title: str = "Load of each rank"
    drawn: DrawnStep | None = None
    lengths: npt.ArrayLike = ()


class PageData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The page.

    Attributes:
        title: of the page.
        runs: one run, or two that stand side by side (one below the other on a phone), with the same axes.
        summary: sentences at the top.
        tables: tables across the whole width, above the columns: what compares the two runs belongs here.
    """

    title: str
    runs: tuple[RunView, ...]
    summary: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.runs) <= 2:
            raise ValueError(f"a page shows one run or two, got {len(self.runs)}")
