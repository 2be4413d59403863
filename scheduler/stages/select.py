"""What a rank brings to a step: chosen by number, by tokens or by lists, with outliers that wait."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from ..config import SchedulerConfig
from .budget import rounds_within
from .collect import Reader
from .describe import Described
from .metadata import Gathered, note_of, with_note
from .outliers import waiting_outliers

_NOBODY = np.zeros(0, np.int64)


class Brought(NamedTuple):
    """What goes into a step.

    Attributes:
        mine: this rank's samples of the step, in table order.
        gathered: everyone's rows.
        waits: for every deferred sample of the group, the steps it has waited.
        fresh: what this rank took from its source for the step, deferred samples among it.
        full: whether every rank brought all that a step asks for.
    """

    mine: list[Described]
    gathered: Gathered
    waits: np.ndarray
    fresh: list[Described]
    full: bool


class Bringer:
    """Chooses the samples of one step after the other, and gathers everyone's rows.

    Args:
        reader: this rank's samples.
        config: settings: how many samples make a step.
        rank: this rank.
        num_ranks: R.
        gather: all-gathers the rows of the given samples.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        config: SchedulerConfig,
        rank: int,
        num_ranks: int,
        gather: Callable[[list[Described]], Gathered],
    ) -> None:
        self._reader = reader
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._gather = gather

    def __call__(self) -> Brought:
        """Return what goes into the next step; collective."""
        config = self._config
        if config.scope == "microbatch":
            mine = self._read_lists(config.num_microbatches or 1)
            gathered = self._gather(mine)
            return Brought(mine, gathered, _NOBODY, mine, not gathered.exhausted.any())
        if config.tokens_per_step is not None:
            return self._brought_by_tokens(config.tokens_per_step)
        assert config.samples_per_step is not None
        self._reader.fill(config.samples_per_step)
        mine = self._reader.take(config.samples_per_step)
        if config.defer is None:
            gathered = self._gather(mine)
            return Brought(mine, gathered, _NOBODY, mine, self._is_full(gathered))
        return self._brought_with_deferral(mine, config.defer)

    def _brought_with_deferral(self, fresh: list[Described], limit: int) -> Brought:
        reader = self._reader
        mine = [*reader.deferred, *((item, 0) for item in fresh)]
        noted = [msgspec.structs.replace(item, row=with_note(item.row, waited)) for item, waited in mine]
        gathered = self._gather(noted)
        full = self._is_full(gathered)
        ending = bool(gathered.exhausted.all()) or (not full and self._config.on_exhausted == "stop")
        waits = waiting_outliers(gathered, num_ranks=self._num_ranks, limit=limit, ending=ending)
        mine_wait = waits[gathered.home == self._rank].tolist()
        reader.deferred = [(item, waited + 1) for (item, waited), wait in zip(mine, mine_wait, strict=True) if wait]
        kept = [item for (item, _), wait in zip(mine, mine_wait, strict=True) if not wait]
        return Brought(kept, gathered.select(~waits), note_of(gathered.rows[waits]) + 1, fresh, full)

    def _is_full(self, gathered: Gathered) -> bool:
        """Return whether every rank brought as many fresh samples as a step asks for."""
        fresh = gathered.home[note_of(gathered.rows) == 0]
        return bool((np.bincount(fresh, minlength=self._num_ranks) >= (self._config.samples_per_step or 0)).all())

    def _read_lists(self, count: int) -> list[Described]:
        mine: list[Described] = []
        for index in range(count):
            items = self._reader.read_list()
            if items is None:
                break
            mine += [msgspec.structs.replace(item, row=with_note(item.row, index)) for item in items]
        return mine

    def _brought_by_tokens(self, budget: int) -> Brought:
        reader, num_ranks = self._reader, self._num_ranks
        wanted, dropped, truncated = -(-budget // num_ranks), 0, 0
        while True:
            reader.fill_tokens(wanted)
            gathered = self._gather(reader.waiting)
            dropped, truncated = dropped + gathered.dropped, truncated + gathered.truncated
            taken, enough, full = rounds_within(gathered, budget=budget, num_ranks=num_ranks)
            if enough:
                chosen = msgspec.structs.replace(gathered.select(taken), dropped=dropped, truncated=truncated)
                mine = reader.take(int(chosen.counts(num_ranks)[self._rank]))
                return Brought(mine, chosen, _NOBODY, mine, full)
            wanted *= 2  # some rank ran out of waiting samples before the budget did: all look further ahead
