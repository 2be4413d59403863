"""The `evenpack` command: one module per subcommand, each with `add_parser` and a function that runs it."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from .. import __version__  # pyright: ignore[reportMissingImports]
from . import doctor, index, masks, plan, report

#: Modules of the subcommands, in the order of the help page.
COMMANDS: tuple[ModuleType, ...] = (masks, index, plan, report, doctor)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="evenpack", description="Online sequence packing for data-parallel training of vision-language models."
    )
    parser.add_argument("--version", action="version", version=f"evenpack {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name.

    Returns:
        The exit code: 0 for success, 1 for wrong input (one line on standard error), 2 for wrong usage.
    """
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        code: int = parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"evenpack {parsed.command}: {error}", file=sys.stderr)
        return 1
    return code
