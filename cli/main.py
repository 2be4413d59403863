"""The `evenpack` command: one module per subcommand, each with `add_parser` and a function that runs it."""

import argparse
import os
import re
import select
import sys
from collections.abc import Mapping, Sequence
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
        print(f"evenpack {parsed.command}: {with_flags(str(error), flags_of(parser, parsed))}", file=sys.stderr)
        return 1
    return code


def flags_of(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> dict[str, str]:
    """Return the flags of the command that was given, by the names of the settings that they are stored under."""
    found: dict[str, str] = {}
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):
            found |= flags_of(action.choices[getattr(parsed, action.dest)], parsed)
        elif action.option_strings:
            found[action.dest] = action.option_strings[-1]
    return found


#: A value after `name=`: in quotes, a tuple of such, or anything up to a space or closing punctuation.
_VALUE = r"(?P<value>\((?:'[^']*'(?:, |,)?)+\)|'[^']*'|[^\s,;:()]*)"


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return an error's text with settings named as the command's flags: `max_tokens=8` becomes `--max-tokens 8`.

    Args:
        text: of an error, which may name settings as arguments of a function.
        flags: by the setting's name. A name of one word is a setting only if `=`, "must" or "was" follows it.

    Example:
        >>> with_flags("max_tokens=8 is below align=16", {"max_tokens": "--max-tokens", "align": "--align"})
        '--max-tokens 8 is below --align 16'
        >>> with_flags("leave it out by SampleEncoder(..., ignored=('a', 'b'))", {"ignored": "--ignore"})
        'leave it out by --ignore a b'
    """
    for name, flag in flags.items():

        def given(found: re.Match[str], flag: str = flag) -> str:
            quoted = re.findall(r"'([^']*)'", found["value"])
            return f"{flag} {' '.join(quoted) or found['value']}"

        text = re.sub(rf"\w+\(\.\.\., {name}={_VALUE}\)", given, text)
        text = re.sub(rf"(?<![\w'\"./-]){name}={_VALUE}", given, text)
        text = re.sub(rf"(?<![\w'\"./-]){name}" + (r"\b(?![\w(])" if "_" in name else r"(?= (?:must|was)\b)"), flag, text)
    return text
