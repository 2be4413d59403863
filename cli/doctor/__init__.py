"""`evenpack doctor`: what is wrong on this machine, or on the ranks that torchrun started, and what to set."""

import argparse
import json
import os
from typing import Any

EXAMPLES = """examples:
  evenpack doctor --cp 2 --tp 4 --sequence-parallel --fp8 blockwise --max-tokens 8192
  evenpack doctor --model Qwen2.5-VL-3B-Instruct
  torchrun --nproc-per-node 8 -m evenpack doctor
  torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m evenpack doctor --json

Alone, it looks at this machine. Under torchrun, started as the training is, it also opens the group as a scheduler does,
compares the ranks, sends samples round, and measures. The first rank prints. The exit code is 1 where something is wrong.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, or the ranks of a job, and say what to set",
        description="Versions, backends, alignment, caches and memory; under torchrun the group, the wire, clocks, bandwidth.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cp", dest="cp_size", type=int, default=1, metavar="SIZE", help="context-parallel size (default: 1)")
    parser.add_argument("--tp", dest="tp_size", type=int, default=1, metavar="SIZE", help="tensor-parallel size (default: 1)")
    parser.add_argument("--sequence-parallel", action="store_true", help="activations are cut along the sequence")
    parser.add_argument("--fp8", choices=("tensorwise", "mxfp8", "blockwise", "nvfp4"), help="FP8 recipe")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a pack per GPU, to check against the alignment")
    parser.add_argument("--lookahead", type=int, default=1, metavar="STEPS", help="steps in view, as in the scheduler")
    parser.add_argument(
        "--step-megabytes", type=float, metavar="MB", help="samples that a rank brings to a step, to see what a window holds"
    )
    parser.add_argument("--transport", choices=("auto", "host", "device"), default="auto", help="as in the scheduler")
    parser.add_argument("--megabytes", type=float, default=16.0, metavar="MB", help="sent by each rank (default: 16)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a collective may take (default: 60)")
    parser.add_argument(
        "--model", metavar="FOLDER", help="a saved model and its processor: run samples in a pack and alone, and compare"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print on the first rank."""
    from ...scheduler.plan.settings import check_int, check_real
    from .examine import examine
    from .finding import as_dict, as_text

    for name in ("cp_size", "tp_size", "max_tokens", "lookahead"):
        if getattr(arguments, name) is not None:
            check_int(name, getattr(arguments, name), 1)
    check_real("megabytes", arguments.megabytes, 0.01, 4096.0)
    check_real("timeout", arguments.timeout, 1.0, 1e5)
    if arguments.step_megabytes is not None:
        check_real("step_megabytes", arguments.step_megabytes, 0.0, 1e6)
    if arguments.model is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--model loads the whole model into one process: start `evenpack doctor --model` without torchrun")
    examined = examine(arguments)
    if examined.prints:
        print(json.dumps(as_dict(examined), indent=1) if arguments.json else as_text(examined), flush=True)
    return int(not examined.is_fine)
