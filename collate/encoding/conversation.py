"""An example of a dataset, read as a conversation: messages, tools, media in order, and what else it carries."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .errors import ConversationError

#: Keys of an example that make the conversation; all others are declared fields, or columns to ignore.
MESSAGES, TOOLS, IMAGES, VIDEOS, TEXT, NAME = "messages", "tools", "images", "videos", "text", "sample_id"
#: Keys under which a part of a message may hold its media item.
HOLDERS = {"image": ("image", "url", "path", "base64", "image_url"), "video": ("video", "url", "path", "video_url")}


class Conversation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an example says.

    Attributes:
        messages: messages as a template takes them: content is a string or a list of parts, media parts without payload.
        tools: JSON schemas of the tools, None where there are none.
        media: modality to its items, in the order of their parts.
        text: a document instead of messages: all of it trains.
        fields: everything else that the example carries.
        name: the example's own name.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Any] | None
    media: Mapping[str, list[Any]]
    text: str | None
    fields: Mapping[str, Any]
    name: str | int | None


def read_example(example: Mapping[str, Any], placeholders: Mapping[str, str], where: str) -> Conversation:
    """Read an example.

    Args:
        example: `messages` (a list, or JSON), or `text` for a document; optional `tools`, `images`, `videos` (items for
            media parts that carry none themselves, in order), `sample_id`, and further fields.
        placeholders: strings in text content that stand for the next media item; see `EncoderConfig`.
        where: how errors name the example.

    Raises:
        ConversationError: no messages, a message of the wrong form, or media items that no part places.
    """
    if not isinstance(example, Mapping):
        raise ConversationError(f"{where}: an example must be a mapping of named values, got {type(example).__name__}")
    if (example.get(MESSAGES) is None) == (example.get(TEXT) is None):
        raise ConversationError(f"{where}: an example needs either {MESSAGES!r} or {TEXT!r}; it has {sorted(example)}")
    given = {"image": listed(example.get(IMAGES)), "video": listed(example.get(VIDEOS))}
    media: dict[str, list[Any]] = {"image": [], "video": []}
    messages: tuple[Mapping[str, Any], ...] = ()
    if example.get(MESSAGES) is not None:
        raw = as_data(example[MESSAGES], MESSAGES, where)
        if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
            raise ConversationError(f"{where}: {MESSAGES!r} must be a list of messages, got {type(raw).__name__} {raw!r:.60}")
        supply = {name: list(items) for name, items in given.items()}
        messages = tuple(read_message(one, at, placeholders, supply, media, where) for at, one in enumerate(raw))
        for name, left in supply.items():
            if left:
                placed = len(given[name]) - len(left)
                raise ConversationError(
                    f"{where}: {len(given[name])} {name}s, but the messages place {placed}: media without placeholder"
                )
    else:
        media = given
    own = (MESSAGES, TOOLS, IMAGES, VIDEOS, TEXT, NAME)
    tools = as_data(example[TOOLS], TOOLS, where) if example.get(TOOLS) is not None else None
    return Conversation(
        messages=messages,
        tools=tools or None,
        media=media,
        text=example.get(TEXT),
        fields={name: value for name, value in example.items() if name not in own and value is not None},
        name=example.get(NAME),
    )


def read_message(
    raw: Any,
    place: int,
    placeholders: Mapping[str, str],
    supply: dict[str, list[Any]],
    media: dict[str, list[Any]],
    where: str,
) -> dict[str, Any]:
    """Return a message with its media taken out, in order, into `media`."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
        raise ConversationError(f"{where}: message {place} must be a mapping with a role, got {raw!r:.80}")
    # Tables fill absent keys with None, which templates would take for values.
    message = {name: without_none(value) for name, value in raw.items() if value is not None}
    weight = message.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ConversationError(f"{where}: message {place} has weight {weight!r}: a finite number of at least 0 is needed")
    content = message.get("content", "")
    if isinstance(content, str):
        content = split_text(content, placeholders) or content
    elif not isinstance(content, list):
        raise ConversationError(f"{where}: message {place}: content must be text or a list of parts, got {content!r:.60}")
    if isinstance(content, list):
        content = [read_part(part, place, supply, media, where) for part in content]
    message["content"] = content
    if "tool_calls" in message:
        message["tool_calls"] = [read_call(call, place, where) for call in listed(message["tool_calls"])]
    return message


def read_part(
    part: Any, place: int, supply: dict[str, list[Any]], media: dict[str, list[Any]], where: str
) -> Mapping[str, Any]:
    """Return a part of a message; a media part gives its item to `media` and keeps its type alone."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ConversationError(f"{where}: message {place}: a part must be text or a mapping with a type, got {part!r:.60}")
    kind = part["type"].removesuffix("_url")
    if kind not in media:
        return part
    held = next((part[key] for key in HOLDERS[kind] if part.get(key) is not None), None)
    if isinstance(held, Mapping) and "url" in held:
        held = held["url"]
    if held is None:
        if not supply[kind]:
            raise ConversationError(
                f"{where}: message {place} places {kind} {len(media[kind])}, but the example has only {len(media[kind])}"
            )
        held = supply[kind].pop(0)
    if kind == "video" and part.get("fps") is not None:
        held = {"frames": held, "fps": part["fps"]}
    media[kind].append(held)
    return {"type": kind}


def read_call(call: Any, place: int, where: str) -> Any:
    """Return a tool call with its arguments as a mapping: some templates walk through them, others write them as JSON."""
    if not isinstance(call, Mapping):
        raise ConversationError(f"{where}: message {place}: a tool call must be a mapping, got {call!r:.60}")
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            return call  # the template writes it as it is
        if isinstance(parsed, dict):
            function = {**function, "arguments": parsed}
            return {**call, "function": function} if "function" in call else function
    return call


def split_text(content: str, placeholders: Mapping[str, str]) -> list[dict[str, str]] | None:
    """Return text content as parts, where it holds placeholders of media; None where it holds none.

    Example:
        >>> split_text("<image>What?", {"<image>": "image"})
        [{'type': 'image'}, {'type': 'text', 'text': 'What?'}]
    """
    if not any(text in content for text in placeholders):
        return None
    pieces = re.split("(" + "|".join(map(re.escape, placeholders)) + ")", content)
    return [
        {"type": placeholders[piece]} if piece in placeholders else {"type": "text", "text": piece} for piece in pieces if piece
    ]


def without_none(value: Any) -> Any:
    """Return nested data without keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def listed(value: Any) -> list[Any]:
    """Return one item or several as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def as_data(value: Any, name: str, where: str) -> Any:
    """Return a column that may be written as JSON text, as tables often hold nested data."""
    if isinstance(value, bytes):
        value = value.decode()
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConversationError(f"{where}: {name!r} is text, but no JSON: {error}") from error
