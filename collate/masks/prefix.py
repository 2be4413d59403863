"""Strategy "prefix": render the conversation up to and including each assistant message, and compare."""

from .edges import content_start, turn_stop
from .job import MaskJob, NotApplicable, Turn


def prefix_turns(job: MaskJob) -> list[Turn]:
    """Return the turns that end where the renderings of the conversation up to each assistant message end.

    A turn begins behind the last header before its end: text that spells a header is hidden in the rendering.

    Raises:
        NotApplicable: a rendering that is no beginning of the whole (a template that strips thinking from earlier turns, or
            looks at the last message), a conversation cut short that the template refuses, or a turn without its markers.
    """
    preset, extents = job.markers(), job.characters()
    turns, before = [], 0
    for number, place in enumerate(job.assistant_places):
        stop = len(_beginning(job, place + 1))
        start = max(job.text.rfind(header, before, stop) for header in preset.assistant)
        first = None if start < 0 else content_start(job.text, start, stop, preset)
        if first is None:
            raise NotApplicable(f"message {place} does not begin with {' or '.join(map(repr, preset.assistant))}")
        last = turn_stop(job.text, first, stop, preset)
        if last is None:
            raise NotApplicable(f"message {place} does not end with {' or '.join(map(repr, preset.ends))}")
        turns.append(Turn(*extents.tokens(first, last), number))
        before = stop
    return turns


def _beginning(job: MaskJob, count: int) -> str:
    """Return the rendering of the first `count` messages, which must be a beginning of the whole."""
    if count == len(job.messages):
        return job.text
    try:
        text = job.renderer.render(job.messages[:count])
    except ValueError as error:
        raise NotApplicable(f"the template refuses the first {count} messages alone: {error}") from error
    if not job.text.startswith(text):
        raise NotApplicable(f"the first {count} messages alone render differently than inside the whole conversation")
    return text
