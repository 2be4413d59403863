"""What a mask strategy is given, and what it returns."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from .extents import Extents
from .presets import MaskPreset

Messages = Sequence[Mapping[str, Any]]


class NotApplicable(Exception):
    """A strategy that cannot say for certain which tokens are the assistant's; the message says why."""


class Turn(NamedTuple):
    """A span of tokens that the assistant wrote.

    Attributes:
        start: first token.
        stop: one past the last token, the end-of-turn token included.
        number: which of the conversation's assistant messages it is, from 0.
    """

    start: int
    stop: int
    number: int


class Renderer(Protocol):
    """Writes a conversation as text, by the chat template."""

    def render(self, messages: Messages) -> str:
        """Return the text of a conversation.

        Raises:
            ValueError: the template refuses the conversation.
        """
        ...


class TokenText(Protocol):
    """What strategies need of a tokenizer."""

    def __hash__(self) -> int:
        """Return a hash: what a marker's tokens are is remembered per tokenizer."""
        ...

    def decode(self, ids: Any, **kwargs: Any) -> Any:
        """Return the text of ids."""
        ...

    def encode(self, text: str, **kwargs: Any) -> Any:
        """Return the ids of a text."""
        ...


class MaskJob(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One conversation, rendered and tokenized.

    Attributes:
        messages: the conversation, as the template was given it.
        text: its rendering, before media placeholders are expanded; control strings that its messages spell are hidden in
            it (see `encoding.shield`), so that a marker in it is a real one.
        ids: its tokens, media placeholders expanded.
        tokenizer: the tokenizer.
        renderer: renders parts of the conversation.
        preset: markers of the format, None where it is unknown.
        tagged: spans (start, stop) of characters of `text` inside the template's generation tags; None where the template
            has none.
        extents: which characters of `text` each token covers; None where the tokenizer cannot say.
        literal: bool [L], tokens that text of the conversation merely spells; None where unknown.
        spelled: control strings that text of the conversation spells.
    """

    messages: Messages
    text: str
    ids: np.ndarray
    tokenizer: TokenText
    renderer: Renderer
    preset: MaskPreset | None
    tagged: Sequence[tuple[int, int]] | None = None
    extents: Extents | None = None
    literal: np.ndarray | None = None
    spelled: tuple[str, ...] = ()

    @property
    def assistant_places(self) -> list[int]:
        """Places of the assistant's messages in the conversation."""
        return [place for place, message in enumerate(self.messages) if message.get("role") == "assistant"]

    def markers(self) -> MaskPreset:
        """Return the preset.

        Raises:
            NotApplicable: the format is unknown.
        """
        if self.preset is None:
            raise NotApplicable("the template is of no known format: give a preset")
        return self.preset

    def characters(self) -> Extents:
        """Return the extents.

        Raises:
            NotApplicable: the tokenizer gives no offsets.
        """
        if self.extents is None:
            raise NotApplicable("the tokenizer gives no character offsets")
        return self.extents
