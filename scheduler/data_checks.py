"""What looks wrong in the data though it is no error: each is said once, as a warning."""

import os
from collections.abc import Sequence

import numpy as np

from ..core import Sample, members_of
from .config import SchedulerConfig
from .stages.describe import Described, id_hash
from .stages.gather import Gathered
from .stages.select import StepSamples

#: Steps without a target, and first samples with shifted labels, that are enough to say so.
NUM_STEPS, NUM_SAMPLES = 3, 3
#: Targets that a sample needs to show that its labels are shifted.
MIN_TARGETS = 4
#: Breach of a window's bound that is said: less is due to single samples.
_BREACH = 0.05
#: Share of a machine's memory that samples of later steps may take without a word.
_MUCH = 0.25


class DataChecks:
    """Looks at the first steps of a run on the rank that writes logs.

    - No label of the first steps, or of a whole epoch shorter than that, trains.
    - Labels are shifted already: they equal the ids moved by one, in the first samples of this rank.
    - One step holds a `sample_id` twice. A `DistributedSampler` repeats a few samples to make the ranks even, at the end of an
      epoch, so a step is judged when it is known not to be the last, or when it repeats more than that.

    Args:
        num_ranks: R.
        config: settings. Where samples may wait for a later step, what a `DistributedSampler` repeats may meet its other half
            before the last one: then only more repeats than it makes are told.
    """

    def __init__(self, num_ranks: int, config: SchedulerConfig) -> None:
        self._num_ranks = num_ranks
        self._config = config
        self._looks_for_breach = True
        self._looks_at_memory = config.lookahead > 1
        self._steps_left: int | None = NUM_STEPS
        self._shifted_left: int | None = NUM_SAMPLES
        self._looks_for_repeats = True
        self._suspicion: str | None = None

    def step(self, number: int, chosen: StepSamples) -> list[str]:
        """Return what to warn of, now that a step is known.

        Args:
            number: of the step.
            chosen: its samples.
        """
        mine, gathered = chosen.mine, chosen.gathered
        found = [
            self._targets(gathered),
            self._shifted(mine),
            *self._repeats(number, mine, gathered),
            self._breach(number, chosen),
            self._memory(chosen),
        ]
        return [text for text in found if text is not None]

    def epoch_ended(self) -> list[str]:
        """Return what to warn of at the end of an epoch."""
        found = None
        if self._steps_left is not None and self._steps_left < NUM_STEPS:
            found = _no_target(f"whole epoch ({NUM_STEPS - self._steps_left} steps)")
            self._steps_left = None
        self._suspicion = None  # no more than an even number of samples per rank asks for
        return [] if found is None else [found]

    def _breach(self, number: int, chosen: StepSamples) -> str | None:
        """A step that holds more than the bounds of a window allow: one sample costs more than a rank's share of it."""
        config, longest = self._config, int(chosen.gathered.records["tokens"].max(initial=0))
        for name, over, bound in (
            ("tokens", chosen.tokens_over_mean, config.step_tokens_tolerance),
            ("samples", chosen.samples_over_mean, config.step_samples_tolerance),
        ):
            if self._looks_for_breach and over > 1 + bound + _BREACH:
                self._looks_for_breach = False
                return (
                    f"step {number} holds {over:.2f} times the mean {name} of the {config.lookahead} steps in view, "
                    f"step_{name}_tolerance={bound:g} allows {1 + bound:g}: a sample of {longest} tokens costs more than a "
                    "rank's share of a step, and others keep the ranks busy meanwhile. A larger samples_per_step gives each of "
                    f"them less weight, lookahead=1 keeps the order; stats.{name}_over_mean has the figure of every step"
                )
        return None

    def _memory(self, chosen: StepSamples) -> str | None:
        """Samples of the steps in view that take much of a machine's memory."""
        carried = chosen.view.carried
        if not self._looks_at_memory or carried is None:
            return None
        self._looks_at_memory = False
        held = int(np.bincount(carried.home, carried.records["nbytes"], minlength=self._num_ranks).max())
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if held * local_ranks <= memory * _MUCH:
            return None
        return (
            f"samples that wait for a later step take {held / 2**30:.1f} GiB on a rank, {held * local_ranks / 2**30:.1f} GiB "
            f"on a machine of {memory / 2**30:.1f} GiB: a smaller lookahead (it is {self._config.lookahead}) takes less, so do "
            "pixel_dtype='bfloat16' and samples that are decoded when their pack is built"
        )

    def _targets(self, gathered: Gathered) -> str | None:
        if self._steps_left is None:
            return None
        if gathered.records["loss_tokens"].any():
            self._steps_left = None
            return None
        self._steps_left -= 1
        if self._steps_left:
            return None
        self._steps_left = None
        return _no_target(f"first {NUM_STEPS} steps")

    def _shifted(self, mine: Sequence[Described]) -> str | None:
        for item in mine:
            if self._shifted_left is None:
                return None
            verdict = labels_are_shifted(members_of(item.block.sample)[0])
            if verdict is False:
                self._shifted_left = None
            elif verdict:
                self._shifted_left -= 1
                if not self._shifted_left:
                    self._shifted_left = None
                    return (
                        "labels look shifted already: in the first samples they equal the ids moved by one. evenpack shifts "
                        "labels itself, so every target would be one token off: give labels aligned with input_ids"
                    )
        return None

    def _repeats(self, number: int, mine: Sequence[Described], gathered: Gathered) -> list[str]:
        if not self._looks_for_repeats:
            return []
        if self._suspicion is not None:  # the step before was not the last one
            self._looks_for_repeats = False
            return [self._suspicion]
        hashes = gathered.records["id_hash"]
        known = np.flatnonzero(hashes)
        order = known[np.argsort(hashes[known], kind="stable")]
        again = hashes[order[1:]] == hashes[order[:-1]]
        num_repeats = int(again.sum())
        if not num_repeats:
            return []
        at = int(np.argmax(again))
        text = _repeated(number, num_repeats, gathered, mine, order[at : at + 2])
        if num_repeats < self._num_ranks:
            self._suspicion = None if self._config.lookahead > 1 else text
            return []
        self._looks_for_repeats = False
        return [text]


def labels_are_shifted(sample: Sample) -> bool | None:
    """Whether a sample's labels are its ids moved by one, throughout; None where too few of them train to tell."""
    if sample.shifted:
        return None
    ids, labels = sample.tensor("input_ids"), sample.tensor("labels")
    if not (ids.is_cpu and labels.is_cpu):
        return None
    trains = labels[:-1] >= 0
    targets = labels[:-1][trains]
    if len(targets) < MIN_TARGETS:
        return None
    return bool((targets == ids[1:][trains]).all()) and not bool((targets == ids[:-1][trains]).all())


def _no_target(where: str) -> str:
    return f"no label of the {where} trains: all are -100 or weigh 0. Look at the labels, or at the mask that made them"


def _repeated(number: int, num_repeats: int, gathered: Gathered, mine: Sequence[Described], pair: np.ndarray) -> str:
    value = gathered.records["id_hash"][pair[0]]
    names = [item.block.sample.sample_id for item in mine if id_hash(item.block.sample.sample_id) == value]
    name = f"sample_id {names[0]!r}" if names else "a sample_id"
    (first, at), (second, again) = sorted((int(gathered.home[row]), _place(row, gathered)) for row in pair)
    text = f"step {number} holds {name} twice ({num_repeats} of {len(gathered)} samples are repeated): "
    if first == second:
        return (
            f"{text}rank {first} brought it twice (samples {at} and {again} of its step). An unsharded "
            "stream is read by every worker process: split it by "
            "torch.utils.data.get_worker_info(), or sample without replacement"
        )
    return (
        f"{text}ranks {first} and {second} brought it (samples {at} and {again} of their step). Each rank must "
        "read its own share: a DistributedSampler, or a stream "
        "split by rank and by worker"
    )


def _place(row: int, gathered: Gathered) -> int:
    """Return the number of a sample among those that its rank brought to the step."""
    return int((gathered.home[:row] == gathered.home[row]).sum())
