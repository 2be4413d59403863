"""The section of docs/model-families.md on families with ordinary positions, written from what `make bench-families` found."""

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from evenpack.models import adapter_for
from evenpack.models.families.refused import REFUSED

from .tiny import FAMILIES, tiny_config, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"
TITLE = "## Families with ordinary positions"
_SECTION = re.compile(rf"{TITLE}\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


_ABOUT = (
    "`adapter_for(config)` derives them from the config: what anchors an image, a tile or a clip, and how its "
    "fields are packed. Each was run as a tiny random model of its class in fp64 (`make bench-families`): a text, "
    "one image, two of other sizes, a text that spells the media token, and a dummy in one pack, against the stock "
    "model on each alone. Gradients are those with the casts to single precision inside the models left out; beside"
    " them, as the models are. *Processor*: largest difference of samples made by the family's own processor "
    "through `SampleEncoder`. *Measured*: samples whose length or grids differ when they are measured without "
    "decoding. `examples/extending/family.py` adds a family from outside."
)


def section(found: Mapping[str, Mapping[str, str]]) -> str:
    """Return the section.

    Args:
        found: family to the figures of its checks; those without a check of their own are shown as "-".
    """
    lines = [
        TITLE,
        "",
        *textwrap.wrap(_ABOUT, 128),
        "",
        "| family | class | anchors | logits | gradients (as they are) | processor | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in sorted(FAMILIES):
        adapter, one = adapter_for(tiny_config(family)), found.get(family, {})
        rules = ", ".join(f"{name}: {rule.rule}" for name, rule in sorted(adapter.anchors.items())) or "grids"
        cells = [one.get("logits", "-"), f"{one.get('gradients', '-')} ({one.get('with_casts', '-')})", one.get("encoded", "-")]
        name = type(tiny_model(family)).__name__
        lines.append(f"| {family} | `{name}` | {rules} | {' | '.join(cells)} | {one.get('measured', '-')} |")
    lines += ["", "Refused, by `adapter_for` and with the reason:", "", "| family | reason |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for family, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{family}`")
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join([*lines, "", ""])


def write_page(found: Mapping[str, Mapping[str, str]], page: Path = PAGE) -> None:
    """Put the section into the page, before the one on media tokens where it has none yet."""
    text, new = page.read_text(encoding="utf-8"), section(found)
    if _SECTION.search(text):
        text = _SECTION.sub(lambda _: new, text)
    else:
        text = text.replace("## Media tokens\n", f"{new}## Media tokens\n")
    page.write_text(text, encoding="utf-8")


def families_on_page(page: Path = PAGE) -> tuple[set[str], set[str]]:
    """Return the families that the page lists as exact, and those that it lists as refused."""
    found = _SECTION.search(page.read_text(encoding="utf-8"))
    exact, _, refused = (found[0] if found else "").partition("Refused, by")
    rows = re.findall(r"^\| ([^|]+) \| `", exact, re.MULTILINE)
    return set(rows), set(re.findall(r"`([^`]+)`(?=[,` |])", "\n".join(re.findall(r"^\|([^|]+)\|", refused, re.MULTILINE))))
