"""What was found, on one rank and on all."""

from typing import Any, Literal

import msgspec

Level = Literal["ok", "note", "wrong"]


#: Findings that one rank makes for its machine.
_MACHINE_WIDE = ("memory",)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        name: what.
        level: fine, worth knowing, or wrong.
        text: what was found.
        fix: what to set or do, where it is not fine.
        figures: numbers, for programs.
    """

    name: str
    level: Level = "ok"
    text: str
    fix: str = ""
    figures: dict[str, Any] = {}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A finding, and the ranks that share it."""

    finding: Finding
    ranks: list[int]


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """Everything.

    Attributes:
        num_ranks: ranks that were looked at.
        prints: whether this rank prints.
        findings: in the order of the checks, each once with the ranks that share it.
    """

    num_ranks: int
    prints: bool
    findings: list[Seen]

    @property
    def is_fine(self) -> bool:
        """Whether nothing is wrong."""
        return all(seen.finding.level != "wrong" for seen in self.findings)


def merge(by_rank: dict[int, list[Finding]]) -> list[Seen]:
    """Return the findings of all ranks, equal ones once, in the order of the first rank's checks."""
    seen: dict[tuple[str, str, str], Seen] = {}
    names: dict[str, None] = {}
    for rank, findings in sorted(by_rank.items()):
        for finding in findings:
            names.setdefault(finding.name)
            key = (finding.name, finding.level, finding.text)
            if key in seen:
                seen[key].ranks.append(rank)
            else:
                seen[key] = Seen(finding=finding, ranks=[rank])
    order = list(names)
    return sorted(seen.values(), key=lambda one: order.index(one.finding.name))


def as_dict(examined: Examined) -> dict[str, Any]:
    """Return the findings as plain data, for JSON."""
    return {
        "fine": examined.is_fine,
        "num_ranks": examined.num_ranks,
        "findings": [{**msgspec.to_builtins(seen.finding), "ranks": seen.ranks} for seen in examined.findings],
    }


def as_text(examined: Examined) -> str:
    """Return the findings as lines for a terminal."""
    width = max(len(seen.finding.name) for seen in examined.findings)
    lines = []
    for seen in examined.findings:
        finding = seen.finding
        where = (
            ""
            if len(seen.ranks) == examined.num_ranks or finding.name in _MACHINE_WIDE
            else f" (rank {_ranks_text(seen.ranks)})"
        )
        level = finding.level.upper() if finding.level == "wrong" else finding.level
        lines.append(f"{level:<5}  {finding.name.ljust(width)}  {finding.text}{where}")
        if finding.fix:
            lines.append(f"{'':<5}  {'':<{width}}  -> {finding.fix}")
    wrong = sum(seen.finding.level == "wrong" for seen in examined.findings)
    ranks = f"{examined.num_ranks} rank{'s' if examined.num_ranks > 1 else ''}"
    lines.append(f"\n{ranks}: " + ("all is fine" if not wrong else f"{wrong} finding{'s are' if wrong > 1 else ' is'} wrong"))
    return "\n".join(lines)


def _ranks_text(ranks: list[int]) -> str:
    """Return ranks as ranges.

    Example:
        >>> _ranks_text([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
