"""`evenpack report`: a recorded run in figures, or two side by side."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  evenpack report runs/first
  evenpack report runs/first runs/second --html compared.html
  evenpack report runs/first --replay

RUN is the folder of a RunLog, which records a run:
  PackingScheduler(loader, ..., callbacks=[RunLog("runs/first")])

The exit code is 1 where the input is wrong, or where a replay differs from the run.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="show a recorded run, or two side by side",
        description="What a recorded run gained and cost: throughput, padding, imbalance, bytes moved, waiting.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run log; two are compared")
    parser.add_argument("--replay", action="store_true", help="plan every recorded step again and compare, bit for bit")
    parser.add_argument("--slowest", type=int, default=5, metavar="N", help="slowest steps to list (default: 5)")
    parser.add_argument("--no-advice", action="store_true", help="do not try other settings on the last steps")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too: one file, no network")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the runs and print what they hold."""
    from ...scheduler.plan.settings import check_int
    from .reading import read_report
    from .result import as_dict, as_text

    check_int("slowest", arguments.slowest, 0)
    if len(arguments.runs) > 2:
        raise ValueError(f"one run is shown, or two are compared, got {len(arguments.runs)}")
    if arguments.html is not None:  # before a long log is read, not after
        from ..page import check_libraries

        check_libraries()
        if not arguments.html.parent.is_dir():
            raise ValueError(f"--html: no folder {arguments.html.parent}")
    found = [
        read_report(
            path,
            num_slowest=arguments.slowest,
            replay=arguments.replay,
            advice=not arguments.no_advice,
            pictures=arguments.html is not None,
        )
        for path in arguments.runs
    ]
    for report in found:
        for note in report.notes:
            print(f"evenpack report: {note}", file=sys.stderr)
    if arguments.html is not None:
        from ..page import write_page
        from .pictures import as_page

        write_page(arguments.html, as_page(found))
        print(f"evenpack report: page written to {arguments.html}", file=sys.stderr)
    print(json.dumps(as_dict(found), indent=1) if arguments.json else as_text(found))
    return int(any(report.differing for report in found))
