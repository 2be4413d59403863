"""The end of the demo: its summary, and the files it leaves behind."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .evaluate import CHANCE
from .exactness import TOLERANCE, Exactness
from .figures import draw_loads, draw_loss
from .progress import StepRecord, Totals


def write_report(folder: Path, records: Sequence[StepRecord], exactness: Exactness, accuracy: float) -> None:
    """Write the pictures and the summary of a run, and print the summary.

    Args:
        folder: where the files go.
        records: one record per step.
        exactness: how packing compared with samples run alone.
        accuracy: on held-out digits.
    """
    totals = Totals.of(records)
    draw_loss(records, accuracy, CHANCE, folder / "loss.png")
    draw_loads(records, folder / "loads.png")
    figures = msgspec.to_builtins(totals) | {"accuracy": accuracy, "chance": CHANCE} | {"exactness": exactness._asdict()}
    (folder / "summary.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(summary(totals, exactness, accuracy))
    print(f"  written        {folder}/: steps.jsonl, summary.json, loss.png, loads.png")


def summary(totals: Totals, exactness: Exactness, accuracy: float) -> str:
    """Return the figures of a run, one per line, each with what it is compared to."""
    moved = totals.moved_bytes / max(1, totals.shuffle_bytes)
    verdict = "equal up to rounding" if exactness.holds else f"NOT EQUAL: the limit is {TOLERANCE:.0e}"
    lines = [
        ("digits", f"{accuracy:.0%} of held-out digits right; chance is {CHANCE:.0%}"),
        ("imbalance", f"{totals.imbalance_home:.3f} without, {totals.imbalance:.3f} with evenpack: largest over mean load"),
        ("efficiency", f"{totals.efficiency:.1%} of the ranks' time is work, as planned; the rest is waiting and dummies"),
        ("padding", f"{totals.padding_batches:.1%} in padded batches of the same memory, {totals.padding_packs:.1%} in packs"),
        (
            "bytes moved",
            f"{_megabytes(totals.moved_bytes)}, {moved:.0%} of a full shuffle's {_megabytes(totals.shuffle_bytes)}",
        ),
        (
            "exactness",
            f"loss {exactness.loss:.1e}, gradients {exactness.gradients:.1e} relative difference"
            f" to {exactness.num_samples} samples run alone: {verdict}",
        ),
        ("speed", f"{totals.tokens:,} tokens in {totals.seconds:.0f} s, {totals.tokens / totals.seconds:,.0f} a second"),
    ]
    return "\n".join(["", "Summary", *(f"  {name:<14} {text}" for name, text in lines)])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
