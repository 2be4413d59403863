"""The table of tested versions: kept as JSON, shown as a page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "compatibility.json", DOCS / "compatibility.md"
LIBRARIES = ("python", "torch", "transformers", "megatron-core", "numpy", "numba")
TOP = """\
# Compatibility

What was tested, by `make compatibility`: a small suite that runs in an environment and writes down what it found there. A cell
is what a check said: `ok`, `-` where the library is not installed, or the error.

"""
BOTTOM = """
| check | what it shows |
|---|---|
| import | every module of the core imports |
| plan | the planner compiles, and finds a plan whose answer is known |
| pack | boundaries and M-RoPE positions of a pack are the known ones |
| 2-rank step | two processes over gloo gather, plan, exchange and pack; every sample comes once |
| Qwen2.5-VL parity | a tiny model in fp64 computes in a pack what its samples compute alone, to 1e-12 |
| Trainer | two steps of `transformers.Trainer` with `PackedTrainerMixin` |
| Megatron-Core | `get_packed_batch` on two data-parallel ranks |

Positions of videos follow the rule of transformers 5.24. 5.0.0 still has the older one, with which packs of Qwen2-VL's and
Qwen2.5-VL's videos differ from the model's own positions; text and images do not.

The full test suite runs on the first set of versions in the table, that of Megatron-Core on the one with its newest version
(`make test`, `make test-megatron`). All ran on a CPU: what needs a GPU (NCCL, flash attention, Transformer Engine) is not in
the table.
"""


def read(path: Path = RECORD) -> list[dict[str, Any]]:
    """Return the rows that were recorded."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def updated(rows: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows with one in the place of that for the same versions, or behind them."""
    found = [dict(row) if one["versions"] == row["versions"] else one for one in rows]
    return found if row in found else [*found, dict(row)]


def render(rows: list[dict[str, Any]], declared: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        rows: each with `versions`, `checks` and `evenpack`.
        declared: the lowest version of a library that `pyproject.toml` accepts.
    """
    checks = list(dict.fromkeys(name for row in rows for name in row["checks"]))
    lines = [[*LIBRARIES, *checks], ["---"] * (len(LIBRARIES) + len(checks))]
    for row in rows:
        cells = [row["versions"].get(name) or "-" for name in LIBRARIES]
        lines.append([*cells, *(row["checks"].get(name, "-").replace("|", "\\|") for name in checks)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{TOP}{table}\n{_bounds(rows, declared)}{BOTTOM}"


def _bounds(rows: list[dict[str, Any]], declared: Mapping[str, str]) -> str:
    lines = ["", "| library | declared lowest | lowest tested |", "|---|---|---|"]
    for name, lowest in declared.items():
        tested = sorted((row["versions"][name] for row in rows if row["versions"].get(name)), key=_number)
        known = tested[0] if tested else "-"
        note = "" if tested and _number(known)[:2] <= _number(f"{lowest}.0")[:2] else " (declared, not tested)"
        lines.append(f"| {name} | {lowest}{note} | {known} |")
    return "\n".join(lines) + "\n"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
