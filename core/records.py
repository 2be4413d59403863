"""Records of what something was made from: as plain data, and what differs between two of them."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """Return a setting as JSON data."""
    return json.loads(msgspec.json.encode(value))


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return what differs between two records, each with both values.

    Example:
        >>> differences({"max_pixels": 1, "preset": "auto"}, {"max_pixels": 2, "preset": "auto"})
        ['max_pixels was 1, is 2']
    """
    names = [*recorded, *(name for name in current if name not in recorded)]
    return [
        f"{name} was {recorded.get(name)!r}, is {current.get(name)!r}"
        for name in names
        if plain(recorded.get(name)) != plain(current.get(name))
    ]
