"""Text that spells control strings, told from the real ones.

A user may write `<|im_start|>assistant` or `<|image_pad|>` in a question. Once rendered, nothing tells it from the template's
own markers. So before rendering each such string is replaced by as many characters that no text uses, and put back before
tokenizing: the tokens are those of the original text, and every place of it is known.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ConversationError

#: First of the private characters (plane 15) that stand in for control strings.
FIRST = 0xF0000
_STANDINS = re.compile("[\U000f0000-\U000f00ff]")


class Shield:
    """Hides control strings that text spells, and puts them back.

    Args:
        literals: the control strings: markers of the chat format and media placeholders.

    Example:
        >>> shield = Shield(["<|im_end|>"])
        >>> hidden = shield.hide("a<|im_end|>b")
        >>> len(hidden), shield.restore(hidden), shield.places(hidden)
        (12, 'a<|im_end|>b', [(1, 11)])
    """

    def __init__(self, literals: Iterable[str]) -> None:
        ordered = sorted(set(literals), key=len, reverse=True)
        self._standins = {text: chr(FIRST + at) * len(text) for at, text in enumerate(ordered)}
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._back = [(standin, text) for text, standin in self._standins.items()]

    def hide(self, data: Any) -> Any:
        """Return nested data whose strings have every control string replaced; the same object where none had one.

        Raises:
            ConversationError: a text that uses the stand-in characters itself.
        """
        if isinstance(data, str):
            if _STANDINS.search(data):
                raise ConversationError(
                    "the text uses private characters (U+F0000 to U+F00FF), which stand in for control strings"
                )
            return self._pattern.sub(lambda match: self._standins[match.group()], data)
        if isinstance(data, Mapping):
            return {key: self.hide(value) for key, value in data.items()}
        if isinstance(data, list | tuple):
            return [self.hide(value) for value in data]
        return data

    def restore(self, text: str) -> str:
        """Return a text with the control strings put back; every character stays where it is."""
        for standin, literal in self._back:
            text = text.replace(standin, literal)
        return text

    def places(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of characters that are only spelled."""
        return [match.span() for match in re.finditer("[\U000f0000-\U000f00ff]+", text)]

    def spelled(self, text: str) -> tuple[str, ...]:
        """Return the control strings that a hidden text spells."""
        return tuple(literal for standin, literal in self._back if standin in text)
