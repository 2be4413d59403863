"""The simulation's figures as the tables of docs/benchmarks.md."""

from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]


def step_table(records: list[Record]) -> str:
    """Return step times over the bound: a row per case and planner, a column per number of ranks."""

    def case(record: Record) -> tuple[str, ...]:
        mark = "" if record["attainable"] else " *"
        return (
            record["model"],
            record["workload"],
            f"`{record['sync']}`",
            record["planner"],
            f"{record['over_bound']:.3f}{mark}",
        )

    return _table(("costs", "workload", "sync", "planner"), records, case)


def planning_table(records: list[Record]) -> str:
    """Return milliseconds of planning, and its share of a step: a row per case and way, a column per number of ranks."""

    def case(record: Record) -> tuple[str, ...]:
        cell = f"{record['cpu'] * 1e3:.0f} ms ({record['share']:.2%}), gap {record['gap']:.2%}"
        return record["workload"], f"`{record['sync']}`", record["way"], cell

    return _table(("workload", "sync", "way"), records, case)


def _table(heads: tuple[str, ...], records: list[Record], case: Callable[[Record], tuple[str, ...]]) -> str:
    ranks = sorted({record["ranks"] for record in records})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for record in records:
        *head, cell = case(record)
        rows.setdefault(tuple(head), {})[record["ranks"]] = cell
    lines = [_line([*heads, *(f"{count:,} ranks" for count in ranks)]), _line(["---"] * (len(heads) + len(ranks)))]
    return "\n".join([*lines, *(_line([*head, *(cells.get(count, "") for count in ranks)]) for head, cells in rows.items())])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
