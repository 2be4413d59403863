"""Read a run once, from first to last step, and keep what a report needs."""

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...scheduler.plan.table import Ints
from ...scheduler.stats import StepStats
from ...scheduler.telemetry.advice import Advice, advise
from ...scheduler.telemetry.advice.what_if import PLAN_STEP, Steps
from ...scheduler.telemetry.run_log import RecordedStep, RunHeader, read_run, replay_differences
from ...scheduler.telemetry.run_log.store import log_file
from ...scheduler.telemetry.summary import Summary

Floats = npt.NDArray[np.float64]
#: Steps that other settings are tried on: the last ones.
_ADVICE_STEPS = 8
#: Lengths that a histogram is drawn of, at most twice as many.
_MANY_LENGTHS = 200_000
#: Differing steps that are listed.
MOST_LISTED = 5


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that took long.

    Attributes:
        step: its number.
        seconds: from its hand-out to that of the next.
        exposed_seconds: of those, waiting for the next step.
        tokens: real tokens of the group.
        imbalance: of its plan.
    """

    step: int
    seconds: float
    exposed_seconds: float
    tokens: int
    imbalance: float


class Pictures(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is drawn of a run.

    Attributes:
        steps: `[S]` numbers of the recorded steps.
        efficiency: `[S]` share of the ranks' time that is work, per step.
        efficiency_home: `[S]` the same, had every sample stayed at home.
        load_home: `[R]` cost of each rank over the run, had every sample stayed at home.
        load: `[R]` cost of each rank over the run, dummies aside.
        lengths: tokens of samples, of steps spread over the run.
        last: the last step.
    """

    steps: Ints
    efficiency: Floats
    efficiency_home: Floats
    load_home: Floats
    load: Floats
    lengths: Ints
    last: RecordedStep


class Report(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A run.

    Attributes:
        name: its path.
        header: settings of its last step.
        varying: settings that changed during the run: the steps from which on they had which value, beginning with the first.
        first_step: number of the first step that is recorded.
        last_step: number of the last.
        num_missing: steps between them that are not recorded.
        num_bytes: size of the records.
        summary: all steps together.
        slowest: the slowest steps, slowest first.
        advice: settings that would have gained on the last steps.
        replayed: steps that were planned again; None where none was asked for.
        differing: those that came out differently: number, and how.
        notes: what could not be read.
        pictures: None where nothing is drawn.
    """

    name: str
    header: RunHeader
    varying: dict[str, list[tuple[int, Any]]]
    first_step: int
    last_step: int
    num_missing: int
    num_bytes: int
    summary: Summary
    slowest: list[SlowStep]
    advice: list[Advice]
    replayed: int | None
    differing: list[tuple[int, list[str]]]
    notes: list[str]
    pictures: Pictures | None


def read_report(
    path: Path, *, num_slowest: int = 5, replay: bool = False, advice: bool = True, pictures: bool = False
) -> Report:
    """Read a run.

    Args:
        path: folder of the run log, or the file in it.
        num_slowest: steps to list.
        replay: plan every step again.
        advice: try other settings on the last steps.
        pictures: keep what a page draws.

    Raises:
        ValueError: no run log, one without a whole step, or one that a replay cannot plan.
    """
    keeper = _Keeper(num_slowest, replay, pictures)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for step in _with_progress(path):
            keeper.add(step)
    if keeper.last is None:
        raise ValueError(f"{path} holds no whole step yet")
    return Report(
        name=str(path),
        header=keeper.last.header,
        varying={name: values for name, values in keeper.settings.items() if len(values) > 1},
        first_step=keeper.stats[0].step,
        last_step=keeper.stats[-1].step,
        num_missing=keeper.stats[-1].step - keeper.stats[0].step + 1 - len(keeper.stats),
        num_bytes=keeper.num_bytes,
        summary=Summary.of(keeper.stats),
        slowest=keeper.keep_slowest(),
        advice=_advice(list(keeper.window)) if advice else [],
        replayed=len(keeper.stats) if replay else None,
        differing=keeper.differing,
        notes=[str(one.message) for one in caught],
        pictures=keeper.pictures() if pictures else None,
    )


def _with_progress(path: Path) -> Iterator[RecordedStep]:
    from tqdm import tqdm

    total = log_file(path).stat().st_size
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        for step in read_run(path):
            yield step
            bar.update(step.num_bytes)


class _Keeper:
    """Takes a run step by step."""

    def __init__(self, num_slowest: int, replay: bool, pictures: bool) -> None:
        self._num_slowest, self._replay, self._pictures = num_slowest, replay, pictures
        self.stats: list[StepStats] = []
        self.slow: list[SlowStep] = []
        self.window: deque[RecordedStep] = deque(maxlen=_ADVICE_STEPS)
        self.differing: list[tuple[int, list[str]]] = []
        self.settings: dict[str, list[tuple[int, Any]]] = {}
        self.num_bytes = 0
        self._loads: dict[str, Floats] = {}
        self._lengths: list[Ints] = []
        self._stride = 1

    @property
    def last(self) -> RecordedStep | None:
        return self.window[-1] if self.window else None

    def add(self, step: RecordedStep) -> None:
        self._note_time(step.stats)
        if self.last is None or step.header is not self.last.header:
            self._note_settings(step)
        self.stats.append(step.stats)
        self.window.append(step)
        self.num_bytes += step.num_bytes
        if self._replay and (differences := replay_differences(step)):
            self.differing.append((step.stats.step, differences))
        if self._pictures:
            self._note_samples(step)

    def _note_time(self, stats: StepStats) -> None:
        """The time between two hand-outs is that of the step before."""
        before = self.stats[-1] if self.stats else None
        if before is None or stats.step_seconds is None or before.step + 1 != stats.step or not self._num_slowest:
            return
        self.slow.append(
            SlowStep(
                step=before.step,
                seconds=stats.step_seconds,
                exposed_seconds=stats.exposed_seconds,
                tokens=before.tokens,
                imbalance=before.imbalance,
            )
        )
        if len(self.slow) > 16 * self._num_slowest:
            self.keep_slowest()

    def _note_settings(self, step: RecordedStep) -> None:
        header = step.header
        told = {name: getattr(header, name) for name in ("version", "num_ranks", "cp_size", "planner", "phases")}
        for name, value in {**header.settings, **told}.items():
            values = self.settings.setdefault(name, [])
            if not values or values[-1][1] != value:
                values.append((step.stats.step, value))

    def keep_slowest(self) -> list[SlowStep]:
        """Return the slowest steps, slowest first, and forget the others."""
        self.slow = sorted(self.slow, key=lambda one: -one.seconds)[: self._num_slowest]
        return self.slow

    def _note_samples(self, step: RecordedStep) -> None:
        table, kept = step.table, step.rank >= 0
        weight = table.cost.reshape(len(table), -1).sum(axis=1)[kept]
        ranks = step.header.num_ranks
        for name, where in (("home", table.home[kept]), ("planned", step.rank[kept])):
            load: Floats = np.bincount(where, weight, minlength=ranks).astype(np.float64)
            before = self._loads.get(name)
            # A run that went on with another number of ranks: the loads are those of its last part.
            self._loads[name] = load if before is None or len(before) != ranks else before + load
        if len(self.stats) % self._stride == 0:
            self._lengths.append(table.tokens)
            if sum(map(len, self._lengths)) > 2 * _MANY_LENGTHS:
                self._lengths, self._stride = self._lengths[::2], 2 * self._stride

    def pictures(self) -> Pictures:
        assert self.last is not None
        return Pictures(
            steps=np.array([one.step for one in self.stats], np.int64),
            efficiency=1 / np.array([max(1.0, one.imbalance) for one in self.stats]),
            efficiency_home=1 / np.array([max(1.0, one.imbalance_home) for one in self.stats]),
            load_home=self._loads["home"],
            load=self._loads["planned"],
            lengths=np.concatenate(self._lengths),
            last=self.last,
        )


def _advice(window: list[RecordedStep]) -> list[Advice]:
    header = window[-1].header
    window = [step for step in window if step.header == header or step.header.settings == header.settings]
    if header.planner != PLAN_STEP or header.config.scope != "group":
        return []
    steps = Steps(
        tables=[step.table for step in window],
        plans=[step.plan for step in window],
        stats=[step.stats for step in window],
        config=header.config,
        num_ranks=header.num_ranks,
        towers=header.towers,
        cp_size=header.cp_size,
        node_of_rank=header.node_of_rank,
        peers=header.peers,
    )
    return advise(steps)
