"""Look ahead: which samples of a window make its first step. Heavy ones wait for each other, all others keep their order.

A sample that costs more than a rank's even share makes every other rank wait, in whichever step it is trained. As many of them
as there are ranks, in one micro-batch, make nobody wait. So each step that is due looks at the samples of `steps` steps, its
own among them: it leaves out what would weigh more than its micro-batches do on average, until such samples fill a
micro-batch or one of them can wait no longer. They then run together, the heaviest that must run first and the others
in descending order, and the step takes as much more work as their ranks need for company. All other samples follow in the
order of the sources, up to the step's share of the work.

The window rolls: every step is chosen from what is in view when it is due, and what it leaves is looked at again with the next.
Pure functions in integers, the same on every rank.

Complexity: O(N log N) for the N samples in view.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec
import numpy as np

from ...core import round_up
from .bounds import fewest_microbatches, objective, with_terms
from .limits import FULL_WINDOW_PACK, MAX_SUM, WINDOW_SAMPLES, WINDOW_STEPS
from .problem import build_problem
from .settings import PlanConfig
from .table import Bools, Ints, SampleTable

#: A rank's mean share of the work of a step, per phase: costs are counted in parts of it.
ONE = 1 << 20


class WindowBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How far a step of a window may differ from the step that the sources' order gives.

    Attributes:
        lookahead: W, steps in view; a sample is trained at most W - 1 steps before or after its turn.
        tokens: most relative difference of a step's real tokens to the mean of the steps in view.
        samples: most relative difference of its number of samples.
    """

    lookahead: int
    tokens: float
    samples: float

    @property
    def last_age(self) -> int:
        """Age at which a sample can wait no longer; it has `lookahead` when its turn comes."""
        return 2 * self.lookahead - 1


def choose_step(
    table: SampleTable,
    age: Ints,
    *,
    num_ranks: int,
    steps: int,
    config: PlanConfig,
    capacity: int,
    bounds: WindowBounds,
) -> Bools:
    """Choose the samples of the step that is due, out of those of all steps in view.

    Every step keeps the bounds of tokens and samples, unless one sample costs more than a rank's share of a step: the step that
    trains it then holds as much for every rank, and so more tokens. The delay is always kept.

    Args:
        table: the samples in view, those of a rank in the order in which its source gave them.
        age: `[N]`, W less the steps until a sample's turn, `bounds.lookahead` being W.
        num_ranks: R.
        steps: steps that these samples are for, at least 1; with 1 the step takes all of them.
        config: settings of the planner.
        capacity: padded tokens of a pack.
        bounds: how far the step may differ.

    Returns:
        `[N]`, the samples to train now: at least one, and at most so many that every further step is left its fewest, as far
        as the delay allows it.

    Example:
        >>> table = SampleTable.from_lengths([8, 2, 2, 2, 8, 2, 2, 2], home=[0, 0, 0, 0, 1, 1, 1, 1])
        >>> age, bounds = np.array([2, 2, 1, 1] * 2), WindowBounds(lookahead=2, tokens=0.1, samples=0.5)
        >>> config = PlanConfig(max_tokens=8, sync="microbatch")
        >>> choose_step(table, age, num_ranks=2, steps=2, config=config, capacity=8, bounds=bounds).tolist()
        [True, False, False, False, False, True, True, True]
    """
    count = len(table)
    if steps <= 1 or count <= 1:
        return np.ones(count, np.bool_)
    view = _View(table, age, num_ranks=num_ranks, steps=steps, config=config, capacity=capacity, bounds=bounds)
    view.run_heavy()
    view.fill_in_order()
    return view.chosen


def merged_rows(table: SampleTable, first: Ints) -> SampleTable:
    """Return a table with a row for every run of rows that starts at `first`: what they hold together.

    Example:
        >>> table = SampleTable.from_lengths([5, 3, 9], home=[0, 0, 1])
        >>> merged_rows(table, np.array([0, 2])).tokens.tolist()
        [8, 9]
    """
    names = ("tokens", "padded", "nbytes", "loss_tokens", "cost")
    sums = {name: np.add.reduceat(getattr(table, name), first, axis=0) for name in names}
    return SampleTable(home=table.home[first], media=np.bitwise_or.reduceat(table.media, first), **sums)


def window_bound(table: SampleTable, *, num_ranks: int, config: PlanConfig, cp_size: int = 1) -> float:
    """Lower bound of a step's objective, if several steps with the same samples were planned as one, for each of them.

    Args:
        table: samples of the step, all within the capacity.
        num_ranks: R.
        config: settings.
        cp_size: context-parallel size.

    Example:
        >>> table = SampleTable.from_lengths([8, 2, 2, 2], home=[0, 0, 1, 1])
        >>> window_bound(table, num_ranks=2, config=PlanConfig(max_tokens=8))
        7.0
    """
    most = (MAX_SUM - 1) // max(int(table.cost.sum()) * config.pipeline_stages, int(table.nbytes.sum()), 1)
    copies = max(min(WINDOW_STEPS, WINDOW_SAMPLES // max(len(table), 1), most), 1)
    problem = build_problem(SampleTable.concatenate([table] * copies), num_ranks=num_ranks, config=config, cp_size=cp_size)
    count = fewest_microbatches(problem) if config.num_microbatches is None else config.num_microbatches * copies
    return with_terms(problem, objective(problem), range(count, count + 1)) / copies


def roll(
    tables: Iterable[SampleTable], *, num_ranks: int, config: PlanConfig, capacity: int, bounds: WindowBounds
) -> Iterator[tuple[SampleTable, Ints]]:
    """Yield the samples of every step as a window chooses them, and the number of the table each of them comes from.

    Args:
        tables: samples of every step in the sources' order, each table in the order of the ranks.
        num_ranks: R.
        config: settings of the planner.
        capacity: padded tokens of a pack.
        bounds: how far a step may differ.

    Example:
        >>> tables = [SampleTable.from_lengths([8, 2, 2, 2], home=[0, 0, 1, 1])] * 2
        >>> bounds = WindowBounds(lookahead=2, tokens=0.1, samples=0.5)
        >>> steps = roll(tables, num_ranks=2, config=PlanConfig(max_tokens=8), capacity=8, bounds=bounds)
        >>> [(table.tokens.tolist(), turn.tolist()) for table, turn in steps]
        [([8, 2, 2, 2, 2], [0, 0, 0, 1, 1]), ([2, 8, 2], [0, 1, 1])]
    """
    sources, step, ahead = iter(tables), 0, 0
    view: SampleTable | None = None
    turn = np.zeros(0, np.int64)
    while True:
        for table in islice(sources, bounds.lookahead - ahead):
            view = table if view is None else SampleTable.concatenate([view, table])
            turn = np.concatenate([turn, np.full(len(table), step + ahead)])
            ahead += 1
        if view is None or not ahead:
            return
        order = np.lexsort((turn, view.home))
        view, turn = view.select(order), turn[order]
        chosen = choose_step(
            view,
            step - turn + bounds.lookahead,
            num_ranks=num_ranks,
            steps=ahead,
            config=config,
            capacity=capacity,
            bounds=bounds,
        )
        yield view.select(chosen), turn[chosen]
        view, turn, step, ahead = view.select(~chosen), turn[~chosen], step + 1, ahead - 1


class _View:
    """The samples in view while the step is chosen from them."""

    def __init__(
        self,
        table: SampleTable,
        age: Ints,
        *,
        num_ranks: int,
        steps: int,
        config: PlanConfig,
        capacity: int,
        bounds: WindowBounds,
    ) -> None:
        self.table, self.age, self.num_ranks, self.steps, self.bounds = table, age, num_ranks, steps, bounds
        self.must = age >= bounds.last_age
        self.chosen = np.zeros(len(table), np.bool_)
        cost = table.cost.reshape(len(table), -1)
        by_index = config.sync == "microbatch"
        if not by_index:  # ranks wait for sums over phases and packs
            cost = cost.sum(axis=1, keepdims=True)
        #: Micro-batches of a mean step that ranks wait in; the tokens that one of them holds on all ranks.
        self.count, self.room = 1, 2**62
        if by_index:
            self.room = num_ranks * capacity
            self.count = round_up(max(-(-int(table.padded.sum()) // (steps * self.room)), 1), config.microbatch_multiple)
        self.single = 2 * table.padded > capacity if by_index else np.zeros(len(table), np.bool_)
        # Float64 rounds each quotient once, alike on every machine; all that follows is in integers.
        mean = np.maximum(cost.sum(axis=0), 1) / (num_ranks * steps)
        self.work = np.floor(cost / mean * ONE).astype(np.int64)
        self.share = self.work.sum(axis=1) // max(int(cost.any(axis=0).sum()), 1)
        self.phase = np.argmax(self.work, axis=1)
        #: Samples that cost more than a micro-batch of a mean step leaves every rank.
        self.heavy = (self.work > ONE // self.count).any(axis=1)
        #: Per phase, what a rank may compute in this step.
        self.load = self._quiet_load()
        #: Per phase, what a sample may cost that runs beside others in source order.
        self.limit = self.load // self.count

    def _quiet_load(self) -> Ints:
        """Share of a step without heavy samples: less than the mean, where one in view will take more than a step.

        That one's step takes as much for every rank, but no more than half of what is not heavy.
        """
        load = np.full(self.work.shape[1], ONE)
        for k in range(len(load)):
            heaviest = int(self.work[:, k].max(initial=0))
            if heaviest > ONE:
                heavy = int(self.work[self.heavy, k].sum())
                light = int(self.work[:, k].sum()) - heavy
                company = min(max(self.num_ranks * heaviest - heavy, 0), light // 2)
                least = int(light * (1 - self.bounds.tokens)) // (self.num_ranks * self.steps)
                load[k] = min(max((light - company) // (self.num_ranks * (self.steps - 1)), least), ONE)
        return load

    def run_heavy(self) -> None:
        """Choose the heavy samples that run now, and what goes with them.

        Those of one phase, at most: of the phases in which a sample can wait no longer, else of the first with enough for
        all ranks.
        """
        heavy = np.flatnonzero((self.work > self.limit).any(axis=1))
        heavy = heavy[np.lexsort((-self.age[heavy], -self.work[heavy].max(axis=1)))]
        by_phase = [(k, heavy[self.phase[heavy] == k]) for k in range(self.work.shape[1])]
        due = [(k, rows) for k, rows in by_phase if self.must[rows].any()]
        # Once the sources have ended, no further heavy sample comes to wait for.
        enough = self.num_ranks if self.steps >= self.bounds.lookahead else 1
        full = [(k, rows) for k, rows in by_phase if (self.work[rows, k] > ONE // self.count).sum() >= enough]
        running = due or full[:1]
        if running:
            self.load[:] = ONE
            self.limit = self.load // self.count
        for k, rows in running:
            self._run_phase(k, rows)

    def _run_phase(self, k: int, heavy: Ints) -> None:
        """Fill micro-batches with samples that are heavy in phase k, `heavy` in descending order of cost."""
        must = self.must[heavy]
        due = heavy[must]
        count = max(-(-len(due) // self.num_ranks), 1)
        # Those that cost hardly more than the first that must run go with it; heavier ones wait until they must.
        most = int(self.work[due[0] if len(due) else heavy[0], k]) * 17 // 16
        rest = heavy[~must & (self.work[heavy, k] <= most)]
        lead = int(self.work[np.concatenate([due[:1], rest[:1]]), k].max())
        self.load[k] = max(ONE, lead * count)
        work = self.num_ranks * lead * count - int(self.work[due, k].sum())
        room = self._usable(count) - int(self.table.padded[due].sum())
        large = self.single | (2 * self.work[:, k] > lead)  # a pack has room for one of these, a rank time for one
        single = self.num_ranks * count - int(large[due].sum())
        kept = beside = 0
        if count >= self.count:  # no micro-batch is left for others: the fewest of a step keep their place beside these
            light = self._reserve()
            room -= int(self.table.padded[light].sum())
            kept = int(self.work[light, k].sum())
            # Samples of which a rank runs one may add up to a little more; in a micro-batch, tokens bound what is beside them.
            beside = 0 if self.room < 2**62 else max(kept - self.num_ranks * lead * count // 32, 0)
        self.chosen[due] = True
        if lead * count > ONE and self.work.shape[1] > 1:
            rest = np.concatenate([rest, self._company(k)])
        for row in rest.tolist():
            cost, size, alone = int(self.work[row, k]), int(self.table.padded[row]), bool(large[row])
            if cost <= work - (beside if alone else kept) and size <= room and alone <= single:
                self.chosen[row] = True
                work, room, single = work - cost, room - size, single - alone
        others = self.count - count
        self.limit[k] = (int(self.load[k]) - lead * count) // others if others > 0 else ONE // self.count

    def _company(self, k: int) -> Ints:
        """Samples that cost much in phase k, where ranks have more to do than in a mean step, and little in others."""
        light = np.flatnonzero((self.phase == k) & (self.work <= self.limit).all(axis=1) & ~self.must)
        elsewhere = self.work[light].sum(axis=1) - self.work[light, k]
        ordered: Ints = light[np.argsort(elsewhere / np.maximum(self.work[light, k], 1), kind="stable")]
        return ordered

    def _usable(self, count: int) -> int:
        """Tokens that so many micro-batches of all ranks hold without much search for what fits."""
        return int(count * self.room * FULL_WINDOW_PACK)

    def _reserve(self) -> Ints:
        """The fewest samples of a step, in source order."""
        light = self._in_order(np.flatnonzero((self.work <= self.limit).all(axis=1)))
        return light[: self._bound(len(self.table), "samples", -1)]

    def _bound(self, total: int, name: str, sign: int) -> int:
        """What a step may hold, at most or at least, of what the steps in view hold together."""
        share = 1 + sign * (self.bounds.tokens if name == "tokens" else self.bounds.samples)
        return int(total * share / self.steps)

    def _needed_count(self) -> int:
        """Micro-batches that the step's share of the tokens in view fills: those of a mean step, or fewer."""
        share = int(self.table.padded.sum()) * min(int(self.load.max()), ONE)
        return max(-(-share // (ONE * self.steps * self.room)), 1)

    def _in_order(self, rows: Ints) -> Ints:
        """Rows by turn, those of every rank in its source's order: the rank with the least work so far gives the next."""
        home = self.table.home[rows]
        by_rank = rows[np.lexsort((-self.age[rows], home))]
        share, home = self.share[by_rank], self.table.home[by_rank]
        done = np.zeros(self.num_ranks, np.int64)
        np.add.at(done, self.table.home[self.chosen], self.share[self.chosen])
        total = np.cumsum(share) - share
        first = np.searchsorted(home, np.arange(self.num_ranks))
        before = np.append(total, 0)[np.minimum(first, len(total))] if len(total) else np.zeros(self.num_ranks, np.int64)
        level = total - before[home] + done[home] + share // 2
        ordered: Ints = by_rank[np.argsort(level, kind="stable")]
        return ordered

    def fill_in_order(self) -> None:
        """Choose samples in source order up to the step's share of the work, within the bounds."""
        self.chosen |= self.must
        left = np.flatnonzero(~self.chosen)
        light = (self.work[left] <= self.limit).all(axis=1)
        order = np.concatenate([self._in_order(left[light]), self._in_order(left[~light])])
        tokens, padded = self.table.tokens, self.table.padded
        raised = max(int(self.load.max()), ONE)

        def taken(values: Ints, most: int) -> int:
            """How many in order fit below a sum, beside what is chosen."""
            return int(np.searchsorted(np.cumsum(values[order]), most - int(values[self.chosen].sum()), side="right"))

        ones = np.ones(len(tokens), np.int64)
        live = [k for k in range(self.work.shape[1]) if self.work[:, k].any()] or [0]
        target = self.num_ranks * int(self.load[live].sum()) // len(live)
        most = [
            int(light.sum()),
            taken(self.share, target),
            taken(padded, self._usable(self._needed_count())),
            taken(tokens, self._bound(int(tokens.sum()), "tokens", 1) * raised // ONE),
            taken(ones, self._bound(len(tokens), "samples", 1) * raised // ONE),
        ]
        # Where one sample has more tokens than a step, the mean of the others is what they can keep.
        common = tokens if self.load.max() == ONE else tokens[~self.heavy]
        least = [
            taken(tokens, self._bound(int(common.sum()), "tokens", -1) - 1) + 1,
            taken(ones, self._bound(len(tokens), "samples", -1)),
        ]
        # Every further step is left its fewest samples, one at least, and one is trained now.
        fewest = max(self._bound(len(tokens), "samples", -1), 1)
        limit = len(tokens) - int(self.chosen.sum()) - (self.steps - 1) * fewest
        number = min(max(min(most), max(least)), max(limit, 0))
        self.chosen[order[:number]] = True
        if not self.chosen.any():
            self.chosen[order[:1]] = True
