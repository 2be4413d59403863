"""`evenpack index`: build an offline index of a dataset, and show one."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from .masks import add_encoder_arguments, make_encoder


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("index", help="build or show an offline index of token counts")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="count the tokens of every example, without pixels")
    build.add_argument("dataset", type=Path, help="a .jsonl file of examples, or a folder that `datasets` saved")
    build.add_argument("--out", type=Path, required=True, help="folder of the index; a build that broke off goes on there")
    add_encoder_arguments(build)
    build.add_argument("--workers", type=int, default=1, help="processes that count (default: 1)")
    build.add_argument("--chunk", type=int, default=1024, help="examples counted at a time (default: 1024)")
    build.add_argument("--max-length", type=int, help="most tokens of a sample; longer ones are left out and counted")
    build.add_argument("--on-error", choices=("error", "skip"), default="error", help="examples that cannot be encoded")
    build.add_argument("--ignore", nargs="*", default=(), metavar="COLUMN", help="columns of the dataset to leave aside")
    build.add_argument("--quiet", action="store_true", help="no progress bar")
    build.set_defaults(run=_run_build)
    show = actions.add_parser("show", help="print what an index holds, and what a plan of it would look like")
    show.add_argument("index", type=Path, help="folder of the index")
    show.add_argument("--json", action="store_true", help="as JSON")
    show.add_argument("--ranks", type=int, help="data-parallel ranks to plan an epoch for")
    show.add_argument("--max-tokens", type=int, default=8192, help="capacity of a pack of that plan (default: 8192)")
    show.add_argument("--samples-per-step", type=int, default=32, help="samples of each rank in a step (default: 32)")
    show.add_argument("--sync", choices=("step", "microbatch"), default="step")
    show.set_defaults(run=_run_show)


def _run_build(arguments: argparse.Namespace) -> int:
    """Build the index and print what it holds."""
    from ..scheduler import OfflineIndex
    from ..scheduler.offline import open_dataset

    encoder = make_encoder(
        arguments,
        arguments.dataset if arguments.dataset.is_dir() else arguments.dataset.parent,
        max_length=arguments.max_length,
        on_oversize="drop",
        ignored=tuple(arguments.ignore),
    )
    index = OfflineIndex.build(
        arguments.out,
        open_dataset(arguments.dataset),
        encoder,
        workers=arguments.workers,
        chunk=arguments.chunk,
        on_error=arguments.on_error,
        progress=not arguments.quiet,
    )
    print(_text_of(summary(index)))
    return 0


def _run_show(arguments: argparse.Namespace) -> int:
    """Print what an index holds.

    Raises:
        ValueError: numbers out of range, or no sample that fits a pack.
    """
    from ..scheduler import OfflineIndex
    from ..scheduler.plan.settings import check_int

    index = OfflineIndex(arguments.index)
    check_int("--max-tokens", arguments.max_tokens, 1)
    check_int("--samples-per-step", arguments.samples_per_step, 1)
    if arguments.ranks is not None:
        check_int("--ranks", arguments.ranks, 1)
    shown = summary(index)
    if arguments.ranks is not None:
        shown |= _plan_summary(index, arguments)
    print(json.dumps(shown, indent=1) if arguments.json else _text_of(shown))
    return 0


def summary(index: Any) -> dict[str, Any]:
    """Return what an index holds, as plain data."""
    lengths = index.tokens(np.arange(len(index)))
    lengths = lengths[lengths > 0]
    shares = np.percentile(lengths, (50, 90, 99, 100)).astype(int).tolist() if len(lengths) else [0] * 4
    limits = {name: index.settings.get(name) for name in ("adapter", "min_pixels", "max_pixels", "max_length")}
    return {
        "examples": len(index),
        "left out": {"could not be encoded": index.num_skipped, "too long": index.num_dropped},
        "tokens": index.num_tokens,
        "images and videos": index.num_media,
        "length": dict(zip(("median", "90%", "99%", "longest"), shares, strict=True)),
        "settings": limits,
    }


def _plan_summary(index: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the first epoch would look like, planned.

    Raises:
        ValueError: every sample is longer than a pack.
    """
    lengths = index.tokens(np.arange(len(index)))
    lengths = lengths[lengths > 0]
    if len(lengths) and lengths.min() > arguments.max_tokens:
        raise ValueError(
            f"{len(lengths):,} of {len(lengths):,} samples are longer than a pack's {arguments.max_tokens:,} tokens "
            f"(the shortest: {lengths.min():,}): none is left to plan; raise --max-tokens"
        )
    from ..models import adapter_for
    from ..scheduler import OfflineConfig

    config = OfflineConfig(
        max_tokens=arguments.max_tokens, samples_per_step=arguments.samples_per_step, sync=arguments.sync, oversize="drop"
    )
    planner = index.planner(config, adapter_for(index.settings["adapter"]), num_ranks=arguments.ranks)
    steps = list(planner.steps(epoch=0))
    # A last step that takes fewer places of the epoch's order than the others says nothing about them, and is apart.
    full = [step.plan for step in steps if step.stop - step.start == arguments.ranks * arguments.samples_per_step]
    plans = [step.plan for step in steps]
    full = full or plans
    packs = sum(plan.tokens.size for plan in plans)
    filled = sum(int(plan.tokens.sum()) for plan in plans)
    return {
        "plan": {
            "steps": len(plans),
            "packs": packs,
            "filled": round(filled / max(1, packs * arguments.max_tokens), 4),
            "imbalance": round(float(np.mean([plan.imbalance for plan in full])), 4) if full else None,
            **_last_step(plans[len(full) :]),
            "dropped": sum(plan.num_dropped for plan in plans),
        }
    }


def _last_step(partial: list[Any]) -> dict[str, Any]:
    """Return the figures of a step that ended the data before it was full; none where there is no such step."""
    return {"last step": {"samples": len(partial[0].rank), "imbalance": round(partial[0].imbalance, 4)}} if partial else {}


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{name} ({', '.join(_shown(key, one) for key, one in value.items())})"
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


def _text_of(shown: dict[str, Any]) -> str:
    """Return plain data as lines of text."""
    lines = []
    for name, value in shown.items():
        if isinstance(value, dict):
            value = ", ".join(_shown(key, one) for key, one in value.items())
        elif isinstance(value, int):
            value = f"{value:,}"
        lines.append(f"{name:<9} {value}")
    return "\n".join(lines)
