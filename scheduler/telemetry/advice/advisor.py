"""`Advisor`: a callback that warns when another setting would gain, with the figure."""

import threading
import time
import warnings
from collections import deque

from ...plan import SampleTable, StepPlan
from ...plan.settings import check_int, check_real
from ...stats import StepStats
from ...step import PackedStep
from .advise import Advice, advise
from .what_if import PLAN_STEP, Steps

#: Seconds that `close` waits for advice that is being worked out.
_PATIENCE = 10.0


class AdviceWarning(UserWarning):
    """Another setting would gain."""


class Advisor:
    """Plans recent steps under other settings now and then, and warns where one would gain, once for each setting.

    That happens on the first rank of the group, on a thread of its own, for the first time when `window` steps are there;
    planning the window again takes some dozen times the planner's time for a step or more. The warning comes out of a later
    `next(scheduler)`, or of `close()`.

    Args:
        every: steps between two looks.
        window: steps that are looked at.
        min_gain: share of the time per unit of work below which nothing is said.
        max_samples: windows with more samples are cut to their newest steps.
        max_seconds: a look that takes longer tries no further setting.

    Attributes:
        advice: what was found so far, by setting.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> PackingScheduler(loader, ..., callbacks=[Advisor()])                           # doctest: +SKIP
        AdviceWarning: max_tokens=8192 leaves packs 61% full ...: samples_per_step=32 ... would cut ... by 12%
    """

    def __init__(
        self, *, every: int = 500, window: int = 8, min_gain: float = 0.03, max_samples: int = 131_072, max_seconds: float = 5.0
    ) -> None:
        check_int("every", every, 1)
        check_int("window", window, 1)
        check_int("max_samples", max_samples, 1)
        check_real("min_gain", min_gain, 0.0, 1.0)
        check_real("max_seconds", max_seconds, 0.0, 1e5)
        self._every, self._min_gain, self._max_samples, self._max_seconds = every, min_gain, max_samples, max_seconds
        self._recent: deque[tuple[StepStats, SampleTable, StepPlan]] = deque(maxlen=window)
        self._until_next = window
        self._thread: threading.Thread | None = None
        self._found: list[Advice] = []
        self.advice: dict[str, Advice] = {}

    def __call__(self, step: PackedStep) -> None:
        """Take note of a step; begin a look when it is time, and warn of what the last one found."""
        if not step.is_writer or step.context.planner != PLAN_STEP or step.context.config.scope != "group":
            return
        self._recent.append((step.stats, step.table, step.plan))
        self._until_next -= 1
        if self._until_next <= 0 and not (self._thread is not None and self._thread.is_alive()):
            self._until_next = self._every
            self._thread = threading.Thread(target=self._look, args=(self._steps(step),), name="evenpack-advisor", daemon=True)
            self._thread.start()
        self._warn()

    def close(self) -> None:
        """Wait for a look that is under way, and warn of what it found."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            self._thread = None
        self._recent.clear()
        self._warn()

    def _steps(self, step: PackedStep) -> Steps:
        context, recent = step.context, list(self._recent)
        while len(recent) > 1 and sum(len(table) for _, table, _ in recent) > self._max_samples:
            del recent[0]
        stats, tables, plans = zip(*recent, strict=True)
        return Steps(
            tables=tables,
            plans=plans,
            stats=stats,
            config=context.config,
            num_ranks=step.plan.num_ranks,
            towers=context.towers,
            cp_size=context.cp_size,
            node_of_rank=context.channel.node_of_rank,
            peers=context.channel.peers,
        )

    def _look(self, steps: Steps) -> None:
        self._found = advise(steps, min_gain=self._min_gain, deadline=time.monotonic() + self._max_seconds)

    def _warn(self) -> None:
        found, self._found = self._found, []
        for advice in found:
            if advice.kind not in self.advice:
                self.advice[advice.kind] = advice
                warnings.warn(advice.text, AdviceWarning, stacklevel=4)
