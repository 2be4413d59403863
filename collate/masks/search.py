"""Strategy "search": find the format's markers among the tokens."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .job import MaskJob, NotApplicable, TokenText, Turn
from .presets import MaskPreset, head

ASSISTANT, OTHER, END = "assistant", "other", "end"


class Found(NamedTuple):
    """A marker among the tokens: where it starts and stops, its kind and its text."""

    start: int
    stop: int
    kind: str
    marker: str


def search_turns(job: MaskJob) -> list[Turn]:
    """Return the turns between the markers of the format, any number of them.

    Refused where the markers that were found do not tell the same sequence of turns as the conversation, and where the
    conversation's own text spells a marker that can't be told from a real one.

    Raises:
        NotApplicable: as above, or an unknown format.
    """
    preset = job.markers()
    if job.spelled and job.literal is None:
        raise NotApplicable(f"text of the conversation spells {job.spelled[0]!r}")
    found = list(markers(job, preset))
    turns, roles = _turns_between(found, len(job.ids), job, preset)
    wanted = _collapsed([message.get("role") == "assistant" for message in job.messages])
    have = _collapsed(roles)
    if wanted not in (have, have[1:] if have[:1] == [False] else have) and have != wanted[1:]:
        raise NotApplicable(f"markers show the turns {_spell(have)}, the conversation has {_spell(wanted)}")
    if len(turns) != sum(wanted):
        raise NotApplicable(f"markers show {len(turns)} assistant turns, the conversation has {sum(wanted)}")
    return turns


def _turns_between(found: Sequence[Found], length: int, job: MaskJob, preset: MaskPreset) -> tuple[list[Turn], list[bool]]:
    """Return the assistant's turns, and for every turn in order whether it is the assistant's."""
    turns: list[Turn] = []
    roles: list[bool] = []
    for index, mark in enumerate(found):
        if mark.kind == END:
            continue
        if mark.kind == OTHER:
            if not (preset.end_opens_next and mark.stop == length and mark.marker in preset.ends):  # closes the last turn
                roles.append(False)
            continue
        closing = next((one for one in found[index + 1 :] if _closes(one, preset)), None)
        following = found[index + 1] if index + 1 < len(found) else None
        if _is_bridge(mark, following, length, job):
            continue
        if following is not None and not _closes(following, preset):
            raise NotApplicable(f"token {mark.start}: an assistant turn has no end before {following.marker!r}")
        if closing is None and not preset.end_opens_next:
            raise NotApplicable(f"token {mark.start}: an assistant turn has no end")
        roles.append(True)
        turns.append(Turn(mark.stop, _stop_of(closing, preset, length), len(turns)))
    return turns, roles


def _closes(mark: Found, preset: MaskPreset) -> bool:
    """Whether a marker closes the assistant's turn before it."""
    return mark.kind == END or mark.marker in preset.ends or preset.end_opens_next


def _stop_of(closing: Found | None, preset: MaskPreset, length: int) -> int:
    """Return where a turn stops: behind its end marker, before a marker that the assistant does not write."""
    if closing is None:
        return length
    return closing.stop if closing.marker in preset.ends else closing.start


def _is_bridge(mark: Found, following: Found | None, length: int, job: MaskJob) -> bool:
    """Whether nothing is said between an assistant marker and the marker that follows: `[/INST]` before `[INST]`."""
    if following is not None and following.kind == END:
        return False
    stop = length if following is None else following.start
    between = job.tokenizer.decode(job.ids[mark.stop : stop].tolist()) if stop > mark.stop else ""
    return not str(between).strip() and (following is not None or stop == mark.stop)


def markers(job: MaskJob, preset: MaskPreset) -> Iterator[Found]:
    """Yield the format's markers in order of place, those that text merely spells left out.

    Raises:
        NotApplicable: a control token of the format that opens no known role.
    """
    kinds = [(text, ASSISTANT) for text in preset.assistant]
    kinds += [(text, OTHER) for text in preset.others]
    kinds += [(text, END) for text in preset.ends if text not in preset.others]
    heads = {text: _pattern_of(job.tokenizer, head(text)) for text, _ in kinds}
    ids, real = job.ids, np.ones(len(job.ids), bool) if job.literal is None else ~job.literal
    starts = np.flatnonzero(np.isin(ids, list({tokens[0] for tokens in heads.values()})) & real)
    found: dict[int, Found] = {}
    openers: set[int] = set()
    for text, kind in kinds:
        pattern = _pattern_of(job.tokenizer, text)
        openers.update(places(ids, heads[text], real, starts))
        for start in places(ids, pattern, real, starts):
            stop = _header_stop(job, start + len(pattern), text, preset if kind == ASSISTANT else None)
            if stop is not None and (start not in found or stop > found[start].stop):
                found[start] = Found(start, stop, kind, text)
    unknown = sorted(openers - set(found))
    if unknown:
        at = unknown[0]
        raise NotApplicable(f"token {at} opens a turn of no known role: {job.tokenizer.decode(ids[at : at + 8].tolist())!r}")
    yield from (found[start] for start in sorted(found))


def _header_stop(job: MaskJob, stop: int, text: str, preset: MaskPreset | None) -> int | None:
    """Return where a header stops, its white space included; None where other text follows than the header has.

    White space may be one token with what follows; that token is left to the header, as no model writes half of it.
    """
    wanted = text[len(text.rstrip()) :]
    required = bool(wanted)
    if preset is not None and preset.optional and not wanted:
        wanted = preset.optional
    while wanted and stop < len(job.ids):
        piece = str(job.tokenizer.decode([int(job.ids[stop])]))
        if piece and wanted.startswith(piece):
            wanted, stop = wanted[len(piece) :], stop + 1
        elif piece.startswith(wanted):
            return stop + 1
        else:
            return None if required else stop
    return stop


@lru_cache(maxsize=512)
def _pattern_of(tokenizer: TokenText, text: str) -> tuple[int, ...]:
    """Return the tokens of a marker, the white space at its end left out: it may merge with what follows."""
    return tuple(tokenizer.encode(text.rstrip(), add_special_tokens=False))


def places(ids: np.ndarray, pattern: Sequence[int], real: np.ndarray, starts: np.ndarray) -> list[int]:
    """Return where a sequence of tokens begins, of the places `starts`; tokens that are only spelled do not count.

    Example:
        >>> places(np.array([1, 2, 1, 2]), [1, 2], np.array([True, True, True, False]), np.array([0, 2]))
        [0]
    """
    fits = starts[starts + len(pattern) <= len(ids)]
    for offset, token in enumerate(pattern):
        fits = fits[(ids[fits + offset] == token) & real[fits + offset]]
    return [int(at) for at in fits]


def _collapsed(roles: Sequence[bool]) -> list[bool]:
    """Return who speaks in turn; neighbouring parts that are not the assistant's count as one.

    Example:
        >>> _collapsed([False, False, True, True])
        [False, True, True]
    """
    return [role for at, role in enumerate(roles) if role or at == 0 or roles[at - 1]]


def _spell(roles: Sequence[bool]) -> str:
    """Write a sequence of turns."""
    return " ".join("assistant" if role else "other" for role in roles) or "none"
