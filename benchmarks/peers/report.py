"""Figures of a peer's packs, and whether our re-implementation decides the same."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from evenpack.cli.what_if.opponents.alone import pack_decreasing
from evenpack.cli.what_if.opponents.common import Pack, to_plan
from evenpack.cli.what_if.opponents.karmarkar_karp import partition
from evenpack.scheduler.plan import PlanConfig, StepPlan

from ..opponents.common import pack_in_order
from ..workloads import Workload


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    Attributes:
        name: of the algorithm.
        origin: "real: package version", "re-implemented" or "evenpack".
        num_packs: packs that hold a sample.
        num_microbatches: packs of the rank that has most.
        over_bound: objective over the lower bound of every plan.
        imbalance: largest over mean load of the ranks.
        over_capacity: packs above the capacity.
        dropped: samples that are in no pack.
        seconds: CPU time of one call.
    """

    name: str
    origin: str
    num_packs: int
    num_microbatches: int
    over_bound: float
    imbalance: float
    over_capacity: int
    dropped: int
    seconds: float

    def line(self) -> str:
        """Return the row as text."""
        return (
            f"{self.name:50}  {self.origin:28}  {self.num_packs:5d}  {self.num_microbatches:3d}  {self.over_bound:9.4f}  "
            f"{self.imbalance:9.4f}  {self.over_capacity:5d}  {self.dropped:7d}  {self.seconds * 1e3:9.1f}"
        )


HEAD = (
    f"{'':50}  {'code':28}  {'packs':>5}  {'M':>3}  {'/ bound':>9}  {'imbalance':>9}  {'over':>5}  {'lost':>7}  {'CPU ms':>9}\n"
    "M: packs of a rank; / bound: objective over the lower bound; over: packs above the capacity"
)


def markdown(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of the documentation: objective over the bound, packs and time, a column per workload."""
    cells: dict[tuple[str, str], list[str]] = {}
    for found in rows.values():
        for row in found:
            over = f", {row.over_capacity} over capacity" if row.over_capacity else ""
            cell = f"{row.over_bound:.3f}, {row.num_packs} packs{over}, {row.seconds * 1e3:.1f} ms"
            cells.setdefault((row.name, row.origin), []).append(cell)
    lines = [["algorithm", "code", *rows], ["---"] * (2 + len(rows)), *([*head, *each] for head, each in cells.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def row_of(name: str, origin: str, plan: StepPlan, capacity: int, seconds: float) -> Row:
    """Read a plan's figures."""
    return Row(
        name=name,
        origin=origin,
        num_packs=int((~plan.is_dummy).sum()),
        num_microbatches=plan.num_microbatches,
        over_bound=plan.value / plan.lower_bound,
        imbalance=plan.imbalance,
        over_capacity=int((plan.padded > capacity).sum()),
        dropped=plan.num_dropped,
        seconds=seconds,
    )


def plan_of(workload: Workload, ranks: Sequence[Sequence[Pack]], config: PlanConfig) -> StepPlan:
    """Turn a peer's packs into a plan of the same table.

    Raises:
        ValueError: packs that hold a sample twice or not at all: figures of less work are no comparison.
    """
    rows = sorted(row for packs in ranks for pack in packs for row in pack)
    if rows != list(range(len(workload.table))):
        raise ValueError(f"the packs hold {len(rows)} samples, {len(set(rows))} of them once, of {len(workload.table)}")
    return to_plan(workload.table, ranks, num_ranks=len(ranks), config=config)


def same_packs(theirs: Sequence[Pack], ours: Sequence[Pack], values: Sequence[int]) -> str:
    """Say how far two divisions of the same samples agree: sample by sample, by their values, or by their sums."""

    def as_sets(packs: Sequence[Pack]) -> list[list[int]]:
        return sorted(sorted(pack) for pack in packs)

    def as_values(packs: Sequence[Pack]) -> list[list[int]]:
        return sorted(sorted(values[row] for row in pack) for pack in packs)

    def as_sums(packs: Sequence[Pack]) -> list[int]:
        return sorted(sum(values[row] for row in pack) for pack in packs)

    if as_sets(theirs) == as_sets(ours):
        return "equal, sample by sample"
    if as_values(theirs) == as_values(ours):
        return "equal up to samples of the same value"
    if as_sums(theirs) == as_sums(ours):
        return "equal sums"
    most, mine = max(as_sums(theirs)), max(as_sums(ours))
    return f"DIFFERENT: {len(theirs)} and {len(ours)} parts, largest sums {most} and {mine}, {mine / most - 1:+.4%}"


def verl_tasks(workloads: Sequence[Workload], num_ranks: int) -> list[dict[str, object]]:
    """Return partitions to compare: of all samples in equal numbers, and of one rank's into packs."""
    tasks: list[dict[str, object]] = []
    for workload in workloads:
        cost = workload.table.cost.tolist()
        own = [value for value, home in zip(cost, workload.table.home.tolist(), strict=True) if home == 0]
        parts = -(-int(workload.table.padded[: len(own)].sum()) // workload.capacity)
        tasks += [{"values": cost, "parts": num_ranks, "equal": True}, {"values": own, "parts": parts, "equal": False}]
    return tasks


def our_partition(task: dict[str, object]) -> list[Pack]:
    """Return the re-implementation's answer to one of `verl_tasks`."""
    return partition(task["values"], task["parts"], equal_counts=task["equal"])  # type: ignore[arg-type]


def flat(ranks: Sequence[Sequence[Pack]]) -> list[Pack]:
    """Return the packs of all ranks."""
    return [pack for packs in ranks for pack in packs]


#: Peer and the function of ours that is to decide the same.
SAME: dict[str, object] = {"swift-in-order": pack_in_order, "bridge": pack_decreasing}


def agreement(peer: str, ranks: Sequence[Sequence[Pack]], workload: Workload) -> str:
    """Compare a peer's packs with our function's, where there is one."""
    lengths = np.asarray(workload.table.padded).tolist()
    ours = SAME[peer](lengths, workload.capacity)  # type: ignore[operator]
    return same_packs(flat(ranks), ours, lengths)
