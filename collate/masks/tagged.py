"""Strategy "template": the spans that the chat template itself marks with its generation tag."""

from .edges import content_start, turn_stop
from .job import MaskJob, NotApplicable, Turn


def tagged_turns(job: MaskJob) -> list[Turn]:
    """Return the turns that lie inside the template's generation tags.

    A tag may be set a little wide or narrow: a header inside it is left out, an end marker right behind it is taken in, and
    what follows the end marker is left out.

    Raises:
        NotApplicable: no tag, nothing inside it, offsets unknown, or weights of messages that cannot be matched to spans.
    """
    if job.tagged is None:
        raise NotApplicable("the template has no generation tag")
    extents = job.characters()
    spans = [(start, stop) for start, stop in job.tagged if stop > start]
    if not spans:
        raise NotApplicable("the template's generation tag is empty")
    places = job.assistant_places
    weights = {float(job.messages[place].get("weight", 1.0)) for place in places}
    if len(spans) != len(places) and weights != {1.0}:
        raise NotApplicable(f"{len(spans)} generation spans for {len(places)} assistant messages of different weights")
    turns = []
    for number, (start, stop) in enumerate(spans):
        if job.preset is not None:
            start = content_start(job.text, start, stop, job.preset) or start
            stop = turn_stop(job.text, start, stop, job.preset) or stop
        turns.append(Turn(*extents.tokens(start, stop), number if len(spans) == len(places) else 0))
    return turns
