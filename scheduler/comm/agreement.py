"""What ranks must agree on before their first step, compared value by value, so that the error can name what differs."""

from typing import Any

import msgspec

from ...core import FieldMismatchError
from .transports import Transport, gather_bytes


def agree(transport: Transport, terms: dict[str, Any]) -> bytes:
    """Compare this rank's terms with everyone's; collective.

    Args:
        transport: collectives of the group.
        terms: names to plain values (what JSON can hold).

    Returns:
        The terms, encoded: equal on all ranks.

    Raises:
        FieldMismatchError: naming each differing term, with both values; the same on every rank.

    Example:
        >>> from evenpack.scheduler.comm.transports import MemoryHub
        >>> agree(MemoryHub(1).transport(0), {"max_tokens": 8})
        b'{"max_tokens":8}'
    """
    mine = msgspec.json.encode(terms, order="deterministic")
    texts = gather_bytes(transport, mine)
    reference = msgspec.json.decode(texts[0])
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise FieldMismatchError(f"rank {rank} differs from rank 0: {_difference(reference, msgspec.json.decode(text))}")
    return mine


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
    return "; ".join(f"{name} is {_brief(other.get(name))}, not {_brief(first.get(name))}" for name in names)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
