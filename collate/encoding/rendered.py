"""An example as the text that is tokenized, with what masks need to know about it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..masks.presets import MaskPreset
from .conversation import Conversation
from .errors import ConversationError
from .escaper import Shield
from .render import ChatRenderer


class WithTools:
    """Renders parts of one conversation with its tools.

    Args:
        renderer: the chat template.
        tools: the conversation's tools.
    """

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Any] | None) -> None:
        self._renderer = renderer
        self._tools = tools

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation; see `ChatRenderer.render`."""
        return self._renderer.render(messages, self._tools)


class Written(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An example, rendered.

    Attributes:
        conversation: what the example says.
        messages: the messages as they were rendered: control strings that text spells hidden.
        text: the rendering, control strings that text spells hidden.
        tagged: spans of characters inside the template's generation tags, None where it has none.
        renderer: renders other parts of the same conversation.
    """

    conversation: Conversation
    messages: Sequence[Mapping[str, Any]]
    text: str
    tagged: Sequence[tuple[int, int]] | None
    renderer: WithTools


def write(
    conversation: Conversation, renderer: ChatRenderer, shield: Shield, preset: MaskPreset | None, close: bool, where: str
) -> Written:
    """Render an example.

    Raises:
        ConversationError: a conversation that the template refuses, or that is rendered with other placeholders than it has.
    """
    try:
        tools = shield.hide(conversation.tools)
        part = WithTools(renderer, tools)
        if conversation.text is not None:
            # The placeholders of a document with media are its author's own.
            text = conversation.text if any(conversation.media.values()) else shield.hide(conversation.text)
            return Written(conversation=conversation, messages=(), text=text, tagged=None, renderer=part)
        messages = renderer.fitted(shield.hide(conversation.messages))
        text, tagged = renderer.render_tagged(messages, tools)
        if shield.places(text):
            check_restored(shield.restore(text), conversation, renderer)
    except ConversationError as error:
        raise ConversationError(f"{where}: {error}") from error
    if close and preset is not None and preset.end_opens_next and messages[-1]["role"] == "assistant":
        text += preset.ends[0]
    return Written(conversation=conversation, messages=messages, text=text, tagged=tagged, renderer=part)


def check_restored(text: str, conversation: Conversation, renderer: ChatRenderer) -> None:
    """Check that hiding control strings left the text as it is without.

    Raises:
        ConversationError: a template that changes what it is given (its case, say), or looks for control strings in it.
    """
    if text != renderer.render(renderer.fitted(conversation.messages), conversation.tools):
        raise ConversationError(
            "text spells control strings of the chat format, and the chat template does not write them as they are"
        )
