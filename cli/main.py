"""The `evenpack` command: one module per subcommand, each with `add_parser` and a function that runs it."""

import argparse
import os
import re
import select
import sys
from collections.abc import Iterable, Sequence
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
        The exit code: 0 for success, 1 for wrong input (one line on standard error), 2 for wrong usage, 3 where a limit that a
        flag sets is exceeded, 141 where the reader
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
        print(f"evenpack {parsed.command}: {with_flags(str(error), _options(parser))}", file=sys.stderr)
        return 1
    return code


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of all options of a parser and its subcommands; positional arguments have no flag."""
    found: set[str] = set()
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(_options, action.choices.values()))
        elif action.option_strings:
            found.add(action.dest)
    return found


def with_flags(text: str, names: Iterable[str]) -> str:
    """Return an error's text with settings named as the command's flags: `max_tokens=8` becomes `--max-tokens 8`.

    Args:
        text: of an error, which may name settings as arguments of a function.
        names: of the command's options. A name of one word is a setting where `=` or "must" follows it.

    Example:
        >>> with_flags("max_tokens=8 is below align=16", ["max_tokens", "align"])
        '--max-tokens 8 is below --align 16'
    """
    for name in names:
        flag = "--" + name.replace("_", "-")
        text = re.sub(rf"(?<![\w'\"./-]){name}=", f"{flag} ", text)
        text = re.sub(
            rf"(?<![\w'\"./-]){name}(?= must\b)" if "_" not in name else rf"(?<![\w'\"./-]){name}\b(?![\w(])", flag, text
        )
    return text
