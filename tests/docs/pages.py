"""The pages of the documentation, taken apart into blocks and commands."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md"))
)
#: Programs that a page may tell the reader to start.
PROGRAMS = ("make", "torchrun", "python", "evenpack", "pip", "export")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}\S[^\n]*\n)+", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: where its text begins, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_session(self) -> bool:
        """Whether it is a session of the interpreter, with its output."""
        return self.language in ("python", "pycon") and self.text.lstrip().startswith(">>>")

    @property
    def is_code(self) -> bool:
        """Whether it is code without output."""
        return self.language in ("python", "py") and not self.is_session


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, without the indentation of a list that they stand in."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    found = []
    for match in FENCE.finditer(text):
        indent, body = match["indent"], match["text"]
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        found.append(Block(page, text.count("\n", 0, match.start("text")) + 1, match["language"], "".join(lines)))
    return found


def commands_of(page: str) -> list[list[str]]:
    """Return the commands of a page as words, from blocks without a language, of shells, and from indented lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    bodies = [block.text for block in blocks_of(page) if block.language in ("", "bash", "sh", "shell", "console")]
    bodies += [match[0] for match in INDENTED.finditer(FENCE.sub("", text))]
    lines = [line.strip() for body in bodies for line in body.replace("\\\n", " ").splitlines()]
    lines = [line.removeprefix("$ ") for line in lines]
    # Two spaces behind the first word are a column of a table that some program printed.
    shown = [line for line in lines if line.split(" ", 1)[0] in PROGRAMS and not line.partition(" ")[2].startswith(" ")]
    return [shlex.split(line, comments=True) for line in shown]
