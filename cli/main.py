"""The `evenpack` command: one module per subcommand, each with `add_parser` and a function that runs it."""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from types import ModuleType

from .._version import __version__  # pyright: ignore[reportMissingImports]
from . import doctor, index, masks, plan, report

#: Modules of the subcommands, in the order of the help page.
_COMMANDS: tuple[ModuleType, ...] = (masks, index, plan, report, doctor)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="evenpack", description="Online sequence packing for data-parallel training of vision-language models."
    )
    parser.add_argument("--version", action="version", version=f"evenpack {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name.

    Returns:
        The exit code: 0 for success, 1 for wrong input (one line on standard error), 2 for wrong usage, 141 where the reader
        of the output went away (`| head`), as a shell says of other programs.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is caught, not when the interpreter ends
    except BrokenPipeError:
        # What is left in the buffer must go somewhere, or the interpreter says so as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _reader_is_gone() -> bool:
    """Whether nobody reads the standard output any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _run(arguments: Sequence[str]) -> int:
    """See `run`."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        code: int = parsed.run(parsed)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            raise  # a command that lost another pipe says so
        print(f"evenpack {parsed.command}: {error}", file=sys.stderr)
        return 1
    return code
