"""Where the assistant's own text begins behind a header, and where it stops."""

from .presets import MaskPreset


def content_start(text: str, start: int, stop: int, preset: MaskPreset) -> int | None:
    """Return where the assistant's text begins in a turn that begins at `start`; None where no header stands there.

    In some formats the header ends the turn before (`[/INST]`), so a generation tag may begin right behind it.

    Example:
        >>> from .presets import PRESETS
        >>> text = "<|im_start|>assistant" + chr(10) + "Yes<|im_end|>"
        >>> content_start(text, 0, len(text), PRESETS["chatml"])
        22
    """
    for header in preset.assistant:
        if text.startswith(header, start) and start + len(header) <= stop:
            start += len(header)
            break
    else:
        rest = _rest_of_header(text, start, preset)
        if rest is None:
            return None
        start += rest
    if preset.optional and text.startswith(preset.optional, start):
        start += len(preset.optional)
    return start


def _rest_of_header(text: str, start: int, preset: MaskPreset) -> int | None:
    """Return how much white space of a header stands at `start`, the rest of it being before; None where none ends there."""
    for header in preset.assistant:
        bare = header.rstrip()
        for given in range(len(bare), len(header) + 1):
            if text.endswith(header[:given], 0, start) and text.startswith(header[given:], start):
                return len(header) - given
    return None


def turn_stop(text: str, start: int, stop: int, preset: MaskPreset) -> int | None:
    """Return the character behind the turn's end marker; None where the turn has none.

    The last end marker of the span counts, so that text which spells one does not cut the turn short. Where an end opens
    the next turn, it stands right behind the span; the last turn of a conversation then has none, and stops with its text.
    """
    if preset.end_opens_next:
        for end in preset.ends:
            if text.startswith(end, stop):
                return stop + len(end)
        return stop
    for end in preset.ends:
        if text.startswith(end, stop):  # a tag that leaves the end marker out
            return stop + len(end)
    found = [at + len(end) for end in preset.ends if (at := text.rfind(end, start, stop)) >= 0]
    return max(found) if found else None
