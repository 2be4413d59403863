"""The chain: the first strategy that is certain decides; where none is, nothing trains and somebody hears of it."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from ...core import SampleError
from .job import MaskJob, NotApplicable, Turn
from .prefix import prefix_turns
from .search import search_turns
from .tagged import tagged_turns
from .thinking import skip_empty_thinking

#: Strategies by name, in the order in which they are tried.
STRATEGIES: Mapping[str, Callable[[MaskJob], list[Turn]]] = {
    "template": tagged_turns,
    "prefix": prefix_turns,
    "search": search_turns,
}


class AssistantMaskError(SampleError):
    """A conversation in which no token would train, or none can be told for certain."""


class TrainedTurns(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turns in a row of tokens, and who found them.

    Attributes:
        turns: spans of tokens, empty thinking left out.
        strategy: name of the strategy that found them; "none" where none was certain.
        reasons: why each strategy that was tried before did not apply.
    """

    turns: tuple[Turn, ...]
    strategy: str
    reasons: Mapping[str, str]


def assistant_turns(job: MaskJob, strategies: Sequence[str] = tuple(STRATEGIES)) -> TrainedTurns:
    """Return what the assistant says in a conversation, by the first strategy that applies.

    Args:
        job: the conversation, rendered and tokenized.
        strategies: names of those to try, in order.

    Returns:
        The turns. Without any where no strategy applies: never a guess.
    """
    reasons: dict[str, str] = {}
    for name in strategies:
        try:
            turns = STRATEGIES[name](job)
        except NotApplicable as reason:
            reasons[name] = str(reason)
            continue
        return TrainedTurns(turns=tuple(_trimmed(turn, job) for turn in turns), strategy=name, reasons=reasons)
    return TrainedTurns(turns=(), strategy="none", reasons=reasons)


def _trimmed(turn: Turn, job: MaskJob) -> Turn:
    """Return a turn without the empty thinking at its start."""
    if job.preset is None or turn.stop <= turn.start:
        return turn
    return turn._replace(start=skip_empty_thinking(job.ids, turn, job.tokenizer, job.preset))


def turn_weights(turns: Sequence[Turn], length: int, message_weights: Sequence[float] = ()) -> np.ndarray:
    """Return the loss weight of each token, float32 [L].

    Args:
        turns: the assistant's turns.
        length: L, tokens of the sample.
        message_weights: weight of each assistant message, in order; 1 where not given.

    Example:
        >>> turn_weights([Turn(1, 3, 0), Turn(4, 5, 1)], 5, [1.0, 0.5]).tolist()
        [0.0, 1.0, 1.0, 0.0, 0.5]
    """
    weights = np.zeros(length, np.float32)
    for turn in turns:
        weight = message_weights[turn.number] if turn.number < len(message_weights) else 1.0
        weights[turn.start : turn.stop] = weight
    return weights
