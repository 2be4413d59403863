"""`evenpack plan`: what packing would gain on given lengths, beside what others do, and what would gain more."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

#: Most ranks, and most samples of a step, that are simulated: what the planner is measured for.
MOST_RANKS, MOST_SAMPLES = 4096, 1_048_576
#: Samples that are planned where nobody says how many steps, and the fewest and most steps.
SAMPLES_PLANNED, FEWEST_STEPS, MOST_STEPS = 16_384, 4, 32
#: Exit code where more samples are dropped than --max-dropped allows.
TOO_MANY_DROPPED = 3
#: Prefix of built-in workloads in the place of a file.
_WORKLOAD = "workload:"

_EXAMPLES = """examples:
  evenpack plan lengths.jsonl --ranks 64 --max-tokens 8192
  evenpack plan train.parquet --column num_tokens --ranks 64 --max-tokens 8192 --sync microbatch --html plan.html
  evenpack plan workload:image-text --ranks 16
  evenpack plan workload:sft --ranks 64 --sync microbatch --lookahead 8

LENGTHS is a file of lengths in tokens: lines of JSON (numbers, or objects with a column of lengths), .csv, .parquet, a folder
that `datasets` or `evenpack index` wrote, or workload:NAME. A column of lists, like input_ids, counts by its elements.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="what packing would gain on your lengths, before you train",
        description="Simulate steps on given lengths: cost, padding, imbalance and bytes moved, beside other ways to batch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which samples are planned, and how."""
    parser.add_argument("lengths", nargs="?", metavar="LENGTHS", help="file of lengths, or workload:NAME (see below)")
    parser.add_argument("--workload", metavar="NAME", help="a built-in workload, in place of LENGTHS")
    parser.add_argument("--column", help="column of the lengths (default: num_tokens, tokens, length, ... or input_ids)")
    parser.add_argument("--grids", metavar="COLUMN", help="column of (t, h, w) patch grids (default: image_grid_thw)")
    parser.add_argument("--vision-tokens", metavar="COLUMN", help="column of numbers of media tokens, where grids are unknown")
    parser.add_argument("--ranks", dest="num_ranks", type=int, required=True, help="data-parallel ranks")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a pack per GPU (a workload has a default)")
    parser.add_argument("--samples-per-step", type=int, default=16, help="samples of a rank in a step (default: 16)")
    parser.add_argument("--sync", choices=("step", "microbatch"), default="step", help="where ranks wait: DDP or FSDP")
    parser.add_argument("--model", metavar="CONFIG", help="config.json of the model, or its folder (default: a typical 7B)")
    parser.add_argument("--cp", dest="cp_size", type=int, default=1, metavar="SIZE", help="context-parallel size (default: 1)")
    parser.add_argument("--align", type=int, help="multiple to which segments are padded (default: 1, or 2 x cp)")
    parser.add_argument("--movement", choices=("minimal", "free"), default="minimal", help="whether homes matter")
    parser.add_argument(
        "--lookahead",
        type=int,
        default=1,
        metavar="STEPS",
        help="steps in view of each: one more row shows what that gains (default: 1)",
    )
    parser.add_argument("--tolerance", type=float, default=0.01, help="imbalance that is worth no move (default: 0.01)")
    parser.add_argument(
        "--microbatch-cost", type=int, default=0, metavar="TOKENS", help="fixed cost of a micro-batch, in tokens"
    )
    parser.add_argument("--oversize", choices=("drop", "truncate", "error"), default="drop", help="samples longer than a pack")
    parser.add_argument(
        "--max-dropped", type=float, metavar="SHARE",
        help="exit with code 3 where more than this share of the samples is dropped or truncated, for example 0.01",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help=f"simulated steps (default: {FEWEST_STEPS} to {MOST_STEPS}, by their size)")
    parser.add_argument("--seed", type=int, default=0, help="order in which samples come (default: 0)")
    parser.add_argument("--no-advice", action="store_true", help="do not try other settings")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too: one file, no network")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print what came out."""
    from tqdm import tqdm

    from .what_if.result import Answer, as_dict, as_page, as_text
    from .what_if.simulate import METHODS, advice_on, simulate

    fitted, setting, max_tokens = read_setting(arguments)
    total = setting.steps * (len(METHODS) + (setting.lookahead > 1))
    with tqdm(total=total, desc="planning", unit="plan", leave=False, disable=not sys.stderr.isatty()) as bar:
        simulation = simulate(fitted.pool, setting, progress=bar.update)
    advice = None if arguments.no_advice else advice_on(simulation, setting, arguments.cp_size)
    answer = Answer(
        fitted=fitted, setting=setting, cp_size=arguments.cp_size, simulation=simulation, advice=advice, asked_tokens=max_tokens
    )
    if arguments.html is not None:
        from .page import write_page

        write_page(arguments.html, as_page(answer))
        print(f"evenpack plan: page written to {arguments.html}", file=sys.stderr)
    print(json.dumps(as_dict(answer), indent=1) if arguments.json else as_text(answer))
    if arguments.max_dropped is not None and fitted.share_above > arguments.max_dropped:
        done = "dropped" if fitted.num_dropped else "cut"
        print(
            f"evenpack plan: {fitted.share_above:.1%} of the samples are {done}, --max-dropped is {arguments.max_dropped:g}",
            file=sys.stderr,
        )
        return TOO_MANY_DROPPED
    return 0


def read_setting(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """Return the samples that fit a pack, what is simulated, and the capacity of a pack per GPU, from `add_arguments`.

    Raises:
        ValueError: wrong input.
    """
    check(arguments)
    from .what_if.pool import fit_pool

    pool, max_tokens = _read_pool(arguments)
    setting = _make_setting(arguments, max_tokens, pool.cost_of)
    return fit_pool(pool, setting.config), setting, max_tokens


def check(arguments: argparse.Namespace) -> None:
    """Refuse numbers out of range, before anything is read.

    Raises:
        ValueError: the first of them, with its limit.
    """
    from ..scheduler.config import MAX_LOOKAHEAD
    from ..scheduler.plan.settings import check_int, check_real

    for name in ("num_ranks", "max_tokens", "samples_per_step", "steps", "cp_size", "align", "lookahead"):
        if getattr(arguments, name) is not None:
            check_int(name, getattr(arguments, name), 1)
    check_int("seed", arguments.seed, 0)
    if arguments.max_dropped is not None:
        check_real("max_dropped", arguments.max_dropped, 0.0, 1.0)
    check_int("microbatch_cost", arguments.microbatch_cost, 0)
    if arguments.lookahead > MAX_LOOKAHEAD:
        raise ValueError(f"--lookahead must be at most {MAX_LOOKAHEAD}, got {arguments.lookahead}")
    if arguments.num_ranks > MOST_RANKS:
        raise ValueError(f"--ranks must be at most {MOST_RANKS:,}, got {arguments.num_ranks:,}")
    samples = arguments.num_ranks * arguments.samples_per_step
    if samples > MOST_SAMPLES:
        raise ValueError(
            f"a step must have at most {MOST_SAMPLES:,} samples, got {arguments.num_ranks:,} ranks x "
            f"{arguments.samples_per_step:,} = {samples:,}: lower --samples-per-step"
        )
    if (arguments.lengths is None) == (arguments.workload is None):
        raise ValueError("give either a file of lengths or a workload, for example workload:sft")
    if arguments.html is not None:
        from .page import check_libraries

        check_libraries()
        if not arguments.html.parent.is_dir():
            raise ValueError(f"--html: no folder {arguments.html.parent}")


def _read_pool(arguments: argparse.Namespace) -> tuple[Any, int]:
    """Return the samples with their costs, and the capacity of a pack per GPU.

    Raises:
        ValueError: wrong input.
    """
    from .what_if.lengths import read_samples
    from .what_if.pool import cost_of_config, cost_of_index, make_pool, usual_cost, workload_samples

    batch = arguments.num_ranks * arguments.samples_per_step
    name = arguments.workload
    if name is None and arguments.lengths.startswith(_WORKLOAD):
        name = arguments.lengths.removeprefix(_WORKLOAD)
    if name is not None:
        for option in ("column", "grids", "vision_tokens"):
            if getattr(arguments, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')} names a column of a file, and workload {name!r} is built in")
        most = SAMPLES_PLANNED if arguments.lookahead == 1 else MOST_SAMPLES
        count = max(batch, min(_default_steps(arguments) * batch, most))
        samples, capacity = workload_samples(name, count, arguments.seed)
        max_tokens = arguments.max_tokens or capacity // arguments.cp_size
    else:
        if arguments.max_tokens is None:
            raise ValueError("--max-tokens is missing: the most tokens of a pack per GPU, for example --max-tokens 8192")
        max_tokens = arguments.max_tokens
        samples = read_samples(
            arguments.lengths, column=arguments.column, grids=arguments.grids, vision_tokens=arguments.vision_tokens
        )
    has_media = samples.grids is not None or samples.vision_tokens is not None
    if arguments.model is not None:
        cost_of = cost_of_config(arguments.model, cp_size=arguments.cp_size)
    else:
        cost_of = cost_of_index(samples.adapter, vision=has_media) if samples.adapter else usual_cost(vision=has_media)
    return make_pool(samples, cost_of), max_tokens


def _default_steps(arguments: argparse.Namespace) -> int:
    """Return the number of steps: as asked for, or enough for steady means."""
    batch = arguments.num_ranks * arguments.samples_per_step
    asked: int | None = arguments.steps
    fewest = max(FEWEST_STEPS, 4 * arguments.lookahead if arguments.lookahead > 1 else 0)
    return asked or min(max(SAMPLES_PLANNED // batch, fewest), max(MOST_STEPS, fewest))


def _make_setting(arguments: argparse.Namespace, max_tokens: int, cost_of: Any) -> Any:
    """Return what is simulated; the GPUs that share a pack count as one with their common room.

    Raises:
        ValueError: settings that the planner refuses.
    """
    from ..scheduler.cost.model import UNITS_PER_TOKEN
    from ..scheduler.plan import PlanConfig
    from .what_if.simulate import Setting

    align = arguments.align or (2 * arguments.cp_size if arguments.cp_size > 1 else 1)
    capacity = max_tokens * arguments.cp_size // align * align
    if capacity == 0:
        raise ValueError(f"--max-tokens {max_tokens} x --cp {arguments.cp_size} is below --align {align}")
    config = PlanConfig(
        max_tokens=capacity,
        sync=arguments.sync,
        align=align,
        movement=arguments.movement,
        tolerance=arguments.tolerance,
        microbatch_cost=arguments.microbatch_cost * UNITS_PER_TOKEN,
        oversize=arguments.oversize,
    )
    return Setting(
        towers=cost_of.towers,
        num_ranks=arguments.num_ranks,
        samples_per_step=arguments.samples_per_step,
        steps=_default_steps(arguments),
        seed=arguments.seed,
        lookahead=arguments.lookahead,
        config=config,
    )
