"""Why an epoch had no step."""

from .config import SchedulerConfig


def why_no_step(config: SchedulerConfig, *, num_ranks: int, num_dropped: int) -> str:
    """Return what to tell about an epoch without a step.

    Args:
        config: settings.
        num_ranks: R.
        num_dropped: samples that the oversize policy dropped in the epoch, on all ranks.

    Example:
        >>> why_no_step(SchedulerConfig(max_tokens=8, samples_per_step=1), num_ranks=1, num_dropped=3)
        'the epoch had no step: the source yielded 0 samples that fit: 3 are longer than the capacity and were dropped'
    """
    sources = "the source" if num_ranks == 1 else f"the sources of all {num_ranks} ranks"
    dropped = f": {num_dropped} are longer than the capacity and were dropped"
    if config.on_exhausted == "stop":
        return (
            f"the epoch had no step: {sources} yielded no full step, and on_exhausted='stop' leaves out the rest"
            f"{dropped if num_dropped else ''}"
        )
    if num_dropped:
        return f"the epoch had no step: {sources} yielded 0 samples that fit{dropped}"
    return (
        f"the epoch had no step: {sources} yielded 0 samples; an iterator can be read once, a list, a data set or a loader "
        "in every epoch"
    )
