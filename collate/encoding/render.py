"""Conversations to text, by the chat template of a processor or tokenizer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ConversationError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages = Sequence[Mapping[str, Any]]


class ChatRenderer:
    """Renders conversations; its output is the text that is tokenized, and the only one.

    Args:
        processor: a processor or a tokenizer with a chat template.
        template_arguments: further variables for the template.

    Attributes:
        template: the chat template, None where there is none.
        is_tagged: whether the template marks what the assistant says.
    """

    def __init__(self, processor: Any, template_arguments: Mapping[str, Any]) -> None:
        tokenizer = getattr(processor, "tokenizer", processor)
        self.template = default_template(getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None))
        self.is_tagged = self.template is not None and GENERATION.search(self.template) is not None
        self._variables = {**tokenizer.special_tokens_map, **template_arguments}
        self._takes_parts = self.template is None or takes_parts(self)

    def render(self, messages: Messages, tools: Sequence[Any] | None = None) -> str:
        """Return the text of a conversation.

        Raises:
            ConversationError: no template, or one that refuses the conversation.
        """
        return self._run(messages, tools, False)[0]

    def render_tagged(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, list[tuple[int, int]] | None]:
        """Return the text, and the spans of characters inside generation tags; None where the template has none.

        Raises:
            ConversationError: no template, or one that refuses the conversation.
        """
        return self._run(messages, tools, self.is_tagged)

    def fitted(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages with content of the form that the template reads: strings, or lists of parts."""
        return [{**message, "content": self._content(message.get("content", ""))} for message in messages]

    def _content(self, content: Any) -> Any:
        if self._takes_parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            return "".join(part.get("text", "") for part in content)
        return content

    def _run(self, messages: Messages, tools: Sequence[Any] | None, tagged: bool) -> tuple[str, list[tuple[int, int]] | None]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.template is None:
            raise ConversationError("the processor has no chat template")
        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=self.template,
                return_assistant_tokens_mask=tagged,
                **self._variables,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ConversationError(f"the chat template refuses the conversation: {error}") from error
        texts, spans = rendered
        return texts[0], [(start, stop) for start, stop in spans[0]] if tagged else None


def default_template(template: Any) -> str | None:
    """Return the template to use, where several are named."""
    if isinstance(template, Mapping):
        if "default" not in template:
            raise ValueError(f"none of the chat templates {sorted(template)} is named 'default'")
        template = template["default"]
    return None if template is None else str(template)


def takes_parts(renderer: ChatRenderer) -> bool:
    """Whether a template reads content as a list of parts, found out by rendering a probe as a plain string."""
    probe = "2718281828"  # digits: no template changes their case
    try:
        return probe not in renderer._run([{"role": "user", "content": probe}], None, False)[0]
    except ConversationError:
        return False
