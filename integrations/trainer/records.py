"""Figures of the packing between two lines of the Trainer's log."""

from ...scheduler import StepStats


class Records:
    """Means of the steps' figures since they were last taken.

    Example:
        >>> Records().take()
        {}
    """

    #: Figures that are logged, by their name in `StepStats`.
    NAMES = ("efficiency", "imbalance", "padding_share", "num_microbatches")

    def __init__(self) -> None:
        self._steps: list[StepStats] = []

    def add(self, stats: StepStats) -> None:
        """Add a step."""
        self._steps.append(stats)

    def take(self) -> dict[str, float]:
        """Return the means, rounded for a log, and start over."""
        steps, self._steps = self._steps, []
        if not steps:
            return {}
        return {name: round(sum(getattr(step, name) for step in steps) / len(steps), 4) for name in self.NAMES}
