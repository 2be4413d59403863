"""Thinking that is empty does not train: at inference it is given, not written."""

import re
from functools import lru_cache

import numpy as np

from .job import TokenText, Turn
from .presets import MaskPreset

#: Most tokens that an empty thinking block may have, white space included.
_LONGEST = 16


@lru_cache(maxsize=64)
def _empty_thinking(preset: MaskPreset) -> tuple[re.Pattern[str], tuple[str, str]] | None:
    """Return the pattern of an empty thinking block, and the strings that may begin it; None where a format has none."""
    if preset.thinking is None:
        return None
    opening, closing = (re.escape(marker) for marker in preset.thinking)
    start = rf"(?:{opening}\s*)?" if preset.closed_thinking else rf"{opening}\s*"
    return re.compile(rf"\s*{start}{closing}\s*"), preset.thinking


def skip_empty_thinking(ids: np.ndarray, turn: Turn, tokenizer: TokenText, preset: MaskPreset) -> int:
    """Return the first token of a turn that trains: behind an empty thinking block, if the turn begins with one.

    The block counts as a whole sequence, so that thinking which says something still trains.
    """
    rule = _empty_thinking(preset)
    if rule is None:
        return turn.start
    pattern, markers = rule
    stop = min(turn.stop, turn.start + _LONGEST)
    text = str(tokenizer.decode(ids[turn.start : stop].tolist())).lstrip()
    if not text.startswith(markers):
        return turn.start
    start = turn.start
    for end in range(turn.start + 1, stop + 1):
        if pattern.fullmatch(str(tokenizer.decode(ids[turn.start : end].tolist()))):
            start = end
    return start
