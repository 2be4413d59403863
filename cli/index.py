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
    build.add_argument(
        "--ignore", dest="ignored", nargs="*", default=(), metavar="COLUMN", help="columns of the dataset to leave aside"
    )
    build.add_argument("--quiet", action="store_true", help="no progress bar")
    build.set_defaults(run=_run_build)
    show = actions.add_parser("show", help="print what an index holds, and what a plan of it would look like")
    show.add_argument("index", type=Path, help="folder of the index")
    show.add_argument("--json", action="store_true", help="as JSON")
    show.add_argument(
        "--ranks", dest="num_ranks", type=int, help="data-parallel ranks to plan steps for, as `evenpack plan` does"
    )
    show.add_argument("--max-tokens", type=int, default=8192, help="capacity of a pack of that plan (default: 8192)")
    show.add_argument("--samples-per-step", type=int, default=16, help="samples of each rank in a step (default: 16)")
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
        ignored=tuple(arguments.ignored),
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
    check_int("max_tokens", arguments.max_tokens, 1)
    check_int("samples_per_step", arguments.samples_per_step, 1)
    shown = summary(index)
    if arguments.num_ranks is not None:
        shown["plan"] = _plan_summary(arguments)
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
        "media": index.num_media,
        "length": dict(zip(("median", "90%", "99%", "longest"), shares, strict=True)),
        "settings": limits,
    }


def _plan_summary(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return figures of `evenpack plan` on the index: of full steps alone, a last step that is not full apart.

    Raises:
        ValueError: numbers out of range, or no sample that fits a pack.
    """
    from . import plan
    from .what_if.simulate import METHODS, OURS, epoch_steps, simulate

    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    given = {"ranks": arguments.num_ranks, "max-tokens": arguments.max_tokens, "samples-per-step": arguments.samples_per_step}
    options = [f"--{name}={value}" for name, value in {**given, "sync": arguments.sync}.items()]
    fitted, setting, _ = plan.read_setting(parser.parse_args([str(arguments.index), *options]))
    steps = list(epoch_steps(fitted.pool, setting, epoch=0))
    partial = [rows for rows, is_partial in steps if is_partial]
    ours = METHODS[OURS]
    shown: dict[str, Any] = {"dropped": fitted.num_dropped, "full steps": len(steps) - len(partial)}
    if shown["full steps"]:
        simulation = simulate(fitted.pool, setting, methods={OURS: ours})
        packs, filled = (
            sum(each) for each in zip(*((plan.tokens.size, plan.tokens.sum()) for plan in simulation.plans), strict=True)
        )
        shown |= {
            "simulated": setting.steps,
            "packs": setting.num_ranks * simulation.figures[OURS].num_microbatches,
            "filled": round(filled / (packs * setting.config.max_tokens), 4),
            "imbalance": simulation.figures[OURS].imbalance,
        }
    for rows in partial:
        table = fitted.pool.table(rows, num_ranks=setting.num_ranks, align=1)
        last = ours(table, num_ranks=setting.num_ranks, config=setting.config, towers=setting.towers)
        shown["last step"] = {"samples": len(rows), "imbalance": last.imbalance}
    return shown


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{name} ({', '.join(_shown(key, one) for key, one in value.items())})"
    return (
        f"{name} {value:,}"
        if isinstance(value, int)
        else f"{name} {value:.5g}"
        if isinstance(value, float)
        else f"{name} {value}"
    )


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
