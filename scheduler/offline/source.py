"""A rank's share of planned epochs, as a source that resumes exactly."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...collate import SampleEncoder
from ...core import SampleError, differences
from .plan import EpochPlanner, PlannedStep

_VERSION = 1


class OfflineSource:
    """Yields this rank's packs, step by step, as lists of encoded samples.

    With `SchedulerConfig(scope="microbatch", num_microbatches=M)` each list becomes one pack as it is; the planner's
    settings must then have the same `num_microbatches`, `max_tokens` and alignment. A pack that the plan leaves empty is an
    empty list.

    Args:
        planner: plans the epochs; see `OfflineIndex.planner`.
        dataset: the examples that the index was built from.
        encoder: the encoder that the index was built with.
        rank: this rank.

    Attributes:
        num_dropped: samples of the whole group that the policy `oversize` of the plan left out so far.
    """

    def __init__(
        self, planner: EpochPlanner, dataset: Sequence[Mapping[str, Any]], encoder: SampleEncoder, *, rank: int
    ) -> None:
        if not 0 <= rank < planner.num_ranks:
            raise ValueError(f"rank must be from 0 to {planner.num_ranks - 1}, got {rank}")
        self._planner = planner
        self._dataset = dataset
        self._encoder = encoder
        self._rank = rank
        self._epoch = 0
        self._start = 0
        self._pack = 0
        self.num_dropped = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for step in self._planner.steps(self._epoch, self._start):
            count = step.plan.num_microbatches
            self.num_dropped += step.num_dropped if self._pack == 0 else 0
            for microbatch in range(self._pack, count):
                samples = self._samples(step, microbatch)
                self._start, self._pack = (step.start, microbatch + 1) if microbatch + 1 < count else (step.stop, 0)
                yield samples
        self._epoch, self._start, self._pack = self._epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last pack that was yielded."""
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "start": self._start,
            "pack": self._pack,
            "rank": self._rank,
            "num_ranks": self._planner.num_ranks,
            "plan": self._plan_record(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises:
            ValueError: a state of other settings, or of another number of ranks (see `load_state_dicts`).
        """
        self._check(state)
        if state["num_ranks"] != self._planner.num_ranks:
            raise ValueError(
                f"the state is of {state['num_ranks']} ranks, this job has {self._planner.num_ranks}: use load_state_dicts"
            )
        self._epoch, self._start, self._pack = state["epoch"], state["start"], state["pack"]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up this rank's share of what the ranks of another job had not read yet; every rank passes the same states.

        The rest of the epoch is planned again, for the present number of ranks.

        Raises:
            ValueError: states that do not stand at the same step, or stand inside one.
        """
        for state in states:
            self._check(state)
        places = {(state["epoch"], state["start"], state["pack"]) for state in states}
        if len(places) != 1 or next(iter(places))[2]:
            raise ValueError(f"the states of {len(states)} ranks do not stand between the same two steps: {sorted(places)}")
        self._epoch, self._start, self._pack = next(iter(places))

    def _samples(self, step: PlannedStep, microbatch: int) -> list[dict[str, Any]]:
        numbers = step.pack(self._rank, microbatch).tolist()
        lengths = self._planner.index.tokens(numbers).tolist() if numbers else []
        samples = []
        for number, length in zip(numbers, lengths, strict=True):
            sample = self._encoder.encode(self._dataset[number], number)
            if sample is None:
                continue  # a policy of the encoder that depends on its mask; the encoder has counted it
            if len(sample["input_ids"]) != length:
                raise SampleError(
                    f"example {number} has {len(sample['input_ids'])} tokens, the index says {length}: the dataset has changed"
                )
            sample.setdefault("sample_id", number)
            samples.append(sample)
        return samples

    def _plan_record(self) -> dict[str, Any]:
        config = self._planner.config
        names = ("seed", "shuffle", "samples_per_step", "tokens_per_step", "num_microbatches", "max_tokens")
        return {**{name: getattr(config, name) for name in names}, "num_samples": len(self._planner.index)}

    def _check(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _VERSION:
            raise ValueError(f"the state has version {state.get('version')}, this is version {_VERSION}")
        changed = differences(state["plan"], self._plan_record())
        if changed:
            raise ValueError(f"the state belongs to another plan: {'; '.join(changed)}")
