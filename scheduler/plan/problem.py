"""The integers that the solvers see, and every check of the input on the way there."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ...core import round_up
from ...core.errors import OversizeSampleError, PlanError
from .integers import descending, exact_sum, floor_scale
from .kernels.jit import NO_PAIRS, Items
from .limits import FULL_SPEED, LARGE_STEP, MAX_SUM, PAIRS_PER_CALL, PAIRS_PER_SAMPLE
from .settings import MEDIA_BITS, NO_TOWERS, MediaTowers, PlanConfig
from .table import Bools, Ints, SampleTable, as_ints

#: Number of different sets of modalities, as bit flags.
NUM_SETS = 1 << len(MEDIA_BITS)


class Problem(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The samples to place, without those that the oversize policy dropped.

    `size` is in padded tokens; `weight` is the cost summed over phases; `limit` is the most items of a pack, the tail not
    counted. `speed` is that of each rank, None where all are equal and a cost is a time.

    `trained_towers` holds, for each, bit flags of the media that run it, and the bit of the dummy that does so where there is
    none of them. `dummy_size`, `dummy_cost` and `dummy_count` are indexed by a set of modalities (bit flags).

    What a part of a larger step knows of the rest, it says by overriding `is_large`, `work`, `media_elsewhere`,
    `cost_elsewhere` and `raised` (`two_level.sharing.PodProblem`); here the step is all there is.
    """

    config: PlanConfig
    towers: MediaTowers
    kept: Ints
    size: Ints
    cost: Ints
    weight: Ints
    nbytes: Ints
    home: Ints
    media: Ints
    num_ranks: int
    capacity: int
    limit: int
    align: int
    pack_align: int
    trained_towers: tuple[tuple[int, int], ...]
    dummy_size: Ints
    dummy_cost: Ints
    dummy_count: Ints
    dummy_known: int
    node: Ints
    allowed: Bools | None
    speed: Ints | None = None

    @property
    def is_large(self) -> bool:
        """Whether time counts more than the last thousandth."""
        return len(self.size) > LARGE_STEP

    @property
    def work(self) -> int:
        """Most pairs of samples that one call of `refine` looks at: a bound on its time."""
        return PAIRS_PER_SAMPLE * len(self.size) + PAIRS_PER_CALL

    @property
    def media_elsewhere(self) -> int:
        """Bit flags of the media that ranks outside this problem may carry in any micro-batch."""
        return 0

    def cost_elsewhere(self, index: int) -> Ints | int:
        """Cost per phase that a micro-batch has on ranks outside this problem."""
        return 0

    def raised(self, largest: Ints) -> Ints:
        """`[M, K]` largest costs, raised to what every micro-batch may cost because of ranks outside this problem."""
        return largest

    # Costs and times: a rank of speed s takes c * FULL_SPEED / s for a cost c. Objective and bounds are times; what a rank or
    # a pack may hold is a cost, rounded down, so that kernels compare nothing but costs.

    @cached_property
    def speeds(self) -> Ints:
        """`[R]` speed of each rank, in parts of `FULL_SPEED`."""
        return np.full(self.num_ranks, FULL_SPEED, np.int64) if self.speed is None else self.speed

    def times(self, cost: Ints) -> Ints:
        """`[R, ...]` time of each rank for these costs, rounded up."""
        if self.speed is None:
            return cost
        rounded: Ints = -(-cost * FULL_SPEED // self.speed.reshape(-1, *[1] * (cost.ndim - 1)))
        return rounded

    def within(self, time: Ints | int) -> Ints:
        """`[R, ...]` most cost that takes each rank at most this time."""
        every = np.repeat(np.asarray(time, np.int64)[None], self.num_ranks, axis=0)
        return every if self.speed is None else every * self.speed.reshape(-1, *[1] * (every.ndim - 1)) // FULL_SPEED

    def evenly(self, cost: Any, count: int = 1) -> Any:
        """Time of a cost (an integer or an array) that is spread over all ranks, and `count` micro-batches each; rounded up."""
        if self.speed is None:
            return -(-cost // (self.num_ranks * count))
        return -(-cost * FULL_SPEED // (int(self.speed.sum()) * count))

    def fastest(self, cost: Any) -> Any:
        """Time of a cost (an integer or an array) on the fastest rank, rounded up."""
        return cost if self.speed is None else -(-cost * FULL_SPEED // int(self.speed.max()))

    def one_each(self, cost: Ints) -> Ints:
        """`[K]` time of at most R samples with these costs `[n, K]`, one on each rank, heaviest on the fastest."""
        if self.speed is None:
            return np.asarray(cost.max(axis=0))
        fast = np.sort(self.speed)[::-1][: len(cost), None]
        times: Ints = (-(-np.sort(cost, axis=0)[::-1] * FULL_SPEED // fast)).max(axis=0)
        return times

    @property
    def num_phases(self) -> int:
        return int(self.cost.shape[1])

    @property
    def stages(self) -> int:
        """Pipeline stages in the objective, which counts them at step sync alone."""
        return self.config.pipeline_stages if self.config.sync == "step" else 1

    @property
    def trained(self) -> int:
        """Bit flags of the dummies that a micro-batch without media needs."""
        return sum(dummy for _, dummy in self.trained_towers)

    @property
    def modalities(self) -> int:
        """Bit flags of all media in the step."""
        return int(np.bitwise_or.reduce(self.media, initial=self.media_elsewhere))

    @property
    def allowed_or_any(self) -> Bools:
        """`allowed`, or `[0, 0]` where any rank may send to any: the form that kernels take."""
        return NO_PAIRS if self.allowed is None else self.allowed

    @cached_property
    def items(self) -> Items:
        """The samples as kernels take them."""
        return Items(self.weight, self.cost, self.size, self.nbytes, self.home)

    @cached_property
    def summed_items(self) -> Items:
        """The samples as kernels take them, with the cost over all phases as their only one."""
        return self.items._replace(cost=self.weight[:, None])

    @cached_property
    def rate(self) -> int:
        """Cost of 1,024 tokens over all phases, on average."""
        return usual_rate(self.weight, self.size)

    @cached_property
    def sizes(self) -> Ints:
        """`[N]` padded tokens, ascending."""
        return np.sort(self.size)

    @cached_property
    def weights(self) -> Ints:
        """`[N]` costs over all phases, heaviest first."""
        return np.sort(self.weight)[::-1]

    @cached_property
    def by_weight(self) -> Ints:
        """`[N]` samples by their cost over all phases, heaviest first."""
        return descending(self.weight)

    @cached_property
    def by_size(self) -> Ints:
        """`[N]` samples by padded tokens, longest first."""
        return descending(self.size)

    @cached_property
    def by_cost(self) -> list[Ints]:
        """Per phase `[N]` samples by cost, heaviest first."""
        if self.num_phases == 1:
            return [self.by_weight]
        return [descending(self.cost[:, k]) for k in range(self.num_phases)]

    @cached_property
    def by_density(self) -> list[Ints]:
        """Per phase `[N]` samples by cost per padded token, densest first."""
        return [np.argsort(-(self.cost[:, k] / self.size), kind="stable") for k in range(self.num_phases)]

    @cached_property
    def by_share(self) -> Ints:
        """`[N]` samples by their largest cost relative to the phase's sum, heaviest first."""
        if self.num_phases == 1:
            return self.by_weight
        return np.argsort(-self._shares.max(axis=1), kind="stable")

    @cached_property
    def main_phase(self) -> Ints:
        """`[N]` phase in which a sample weighs most, relative to the phase's sum."""
        if self.num_phases == 1:
            return np.zeros(len(self.size), np.int64)
        phases: Ints = np.argmax(self._shares, axis=1).astype(np.int64)
        return phases

    @property
    def _shares(self) -> npt.NDArray[np.float64]:
        shares: npt.NDArray[np.float64] = self.cost / np.maximum(self.cost.sum(axis=0), 1)
        return shares

    def subset(self, index: npt.NDArray[Any]) -> Self:
        """The same problem with some of its samples; `kept` then counts positions in this problem."""
        index = np.flatnonzero(index) if index.dtype == np.bool_ else index
        # A new object: cached orders do not carry over.
        return msgspec.structs.replace(
            self,
            kept=index.astype(np.int64),
            size=self.size[index],
            cost=self.cost[index],
            weight=self.weight[index],
            nbytes=self.nbytes[index],
            home=self.home[index],
            media=self.media[index],
        )


def over_phases(cost: Ints) -> Ints:
    """`[N]` sums of costs `[N, K]` over phases, as a new array."""
    # With one phase a copy costs a tenth of a sum over an axis of length one.
    return cost[:, 0].copy() if cost.shape[1] == 1 else cost.sum(axis=1)


def usual_rate(weight: Ints, size: Ints) -> int:
    """Cost of 1,024 tokens, on average."""
    return max(int(weight.sum()) * 1024 // max(int(size.sum()), 1), 1)


def bound_with_tolerance(problem: Problem, bound: int) -> int:
    """The bound with the tolerance on top: how far above it a plan may end, so that samples stay at home."""
    return bound + floor_scale(bound, problem.config.tolerance)


def limit_plus_slack(problem: Problem, limit: int) -> int:
    """The limit with a tenth of the tolerance on top: what is nearer is not worth more bytes."""
    return limit + floor_scale(limit, problem.config.tolerance) // 10


def build_problem(
    table: SampleTable,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
    speeds: Sequence[int] | None = None,
) -> Problem:
    """Check everything and drop oversize samples where the policy says so.

    Raises:
        ValueError: sizes, peers, nodes or speeds that make no sense.
        PlanError: a table with values out of range.
        OversizeSampleError: a sample above the capacity under `oversize` "error" or "truncate".
    """
    for name, number in (("num_ranks", num_ranks), ("cp_size", cp_size)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    # Everything is checked here, once: solvers and kernels check nothing.
    columns = _columns(table)
    align = config.segment_align(cp_size)
    pack_align = config.pack_align if config.pack_align is not None else align
    if pack_align % align:
        raise ValueError(f"pack_align={pack_align} must be a multiple of align={align} (cp_size={cp_size})")
    capacity = config.capacity(cp_size)
    if capacity == 0:
        raise ValueError(f"capacity {config.max_tokens * cp_size} is below pack_align={pack_align}")
    _check_table(columns, num_ranks, align)
    cost = columns["cost"]
    speed, total_cost = _speeds(speeds, num_ranks), exact_sum(cost) * config.pipeline_stages
    longest = 0
    if speed is not None:
        # Limits are up to four times the bound, and what the fastest rank can do in the time of the slowest is asked as well.
        longest = total_cost * max(4 * int(speed.max()), FULL_SPEED) // int(speed.min())
    for what, total in (
        ("costs of the step", total_cost),
        ("costs of the step, by the speeds of the fastest and the slowest rank,", longest),
        ("tokens of the step", exact_sum(columns["padded"])),
        ("bytes of the step", exact_sum(columns["nbytes"])),
    ):
        if total >= MAX_SUM:
            raise PlanError(f"the {what} add up to {total}, above the limit of {MAX_SUM}: use a coarser unit")
    # Sums are known to fit from here on.
    kept = _within_capacity(columns["padded"], capacity, config)
    if len(kept) < len(table):
        columns = {name: column[kept] for name, column in columns.items()}
    cost = columns["cost"]
    dummy_size, dummy_cost, known = _dummies(towers, align, cost.shape[1])
    return Problem(
        config=config,
        towers=towers,
        kept=kept,
        size=columns["padded"],
        cost=cost,
        weight=over_phases(cost),
        nbytes=columns["nbytes"],
        home=columns["home"],
        media=columns["media"],
        num_ranks=num_ranks,
        capacity=capacity,
        limit=_segment_limit(config.max_segments, pack_align > align),
        align=align,
        pack_align=pack_align,
        trained_towers=_trained_towers(towers),
        dummy_size=dummy_size,
        dummy_cost=dummy_cost,
        dummy_count=np.array([flags.bit_count() for flags in range(NUM_SETS)], np.int64),
        dummy_known=known,
        node=_nodes(node_of_rank, num_ranks),
        allowed=_allowed(peers, num_ranks),
        speed=speed,
    )


def _columns(table: SampleTable) -> dict[str, Ints]:
    columns = {}
    for name in SampleTable.__struct_fields__:
        try:
            columns[name] = as_ints(getattr(table, name), copy=False)
        except ValueError as error:
            raise PlanError(f"column {name!r} of the table: {error}") from None
    count = len(columns["tokens"])
    for name, column in columns.items():
        if len(column) != count or (column.ndim != 1 and not (name == "cost" and column.ndim == 2 and column.shape[1])):
            raise PlanError(f"column {name!r} has shape {column.shape}, expected [{count}]")
    if columns["cost"].ndim == 1:
        columns["cost"] = columns["cost"][:, None]
    return columns


def _check_table(columns: dict[str, Ints], num_ranks: int, align: int) -> None:
    tokens, padded, most = columns["tokens"], columns["padded"], np.iinfo(np.int64).max
    for name, low, high, rule in (
        ("tokens", 1, most, "at least 1"),
        ("nbytes", 0, most, "at least 0"),
        ("home", 0, num_ranks - 1, f"a rank from 0 to {num_ranks - 1}"),
        ("media", 0, NUM_SETS - 1, f"bit flags below {NUM_SETS}"),
        ("loss_tokens", 0, most, "at least 0"),
        ("cost", 0, most, "at least 0"),
    ):
        column = columns[name]
        # Two passes without a mask tell that all is well, as it nearly always is.
        if column.size and (column.min() < low or column.max() > high):
            _refuse(columns, name, (column < low) | (column > high), rule)
    _refuse(columns, "padded", padded < tokens, "at least the sample's tokens")
    if align > 1:
        _refuse(columns, "padded", padded % align != 0, f"a multiple of align={align}")


def _refuse(columns: dict[str, Ints], name: str, broken: Bools, rule: str) -> None:
    if broken.any():
        row = int(np.argmax(broken.reshape(len(broken), -1).any(axis=1)))
        raise PlanError(f"sample {row}: {name} must be {rule}, got {columns[name][row].tolist()}")


def _within_capacity(padded: Ints, capacity: int, config: PlanConfig) -> Ints:
    above = padded > capacity
    if not above.any():
        return np.arange(len(padded))
    if config.oversize != "drop":
        row = int(np.argmax(above))
        hint = " after truncation" if config.oversize == "truncate" else ""
        raise OversizeSampleError(
            f"sample {row} has {padded[row]} padded tokens{hint}, above the capacity of {capacity} "
            f"({np.count_nonzero(above)} such samples in the step)"
        )
    return np.flatnonzero(~above)


def _segment_limit(max_segments: int | None, has_tail: bool) -> int:
    """Most items of a pack; a tail, where packs may need one, takes a place."""
    if max_segments is None:
        return 2**31
    return max(max_segments - has_tail, 1)


def _trained_towers(towers: MediaTowers) -> tuple[tuple[int, int], ...]:
    """Trained towers, as `Problem.trained_towers`. The dummy is of the first trained modality, images before videos."""
    alone = tuple((name,) for name in MEDIA_BITS if not any(name in group for group in towers.shared))
    trained = {name: bit for name, bit in MEDIA_BITS.items() if name in towers.trained}
    found = []
    for group in (*towers.shared, *alone):
        own = [bit for name, bit in trained.items() if name in group]
        if own:
            found.append((sum(MEDIA_BITS[name] for name in group), own[0]))
    return tuple(found)


def _dummies(towers: MediaTowers, align: int, num_phases: int) -> tuple[Ints, Ints, int]:
    size, cost, known = np.zeros(NUM_SETS, np.int64), np.zeros((NUM_SETS, num_phases), np.int64), 0
    for name, bit in MEDIA_BITS.items():
        tokens = round_up(towers.dummy_tokens.get(name, 1), align)
        phases = towers.dummy_cost.get(name, (0,) * num_phases)
        if len(phases) != num_phases:
            raise ValueError(f"dummy_cost[{name!r}] has {len(phases)} phases, the samples have {num_phases}")
        known |= bit if name in towers.dummy_tokens else 0
        for flags in range(NUM_SETS):
            if flags & bit:
                size[flags] += tokens
                cost[flags] += np.array(phases, np.int64)
    return size, cost, known


def _nodes(node_of_rank: Sequence[int] | None, num_ranks: int) -> Ints:
    if node_of_rank is None:
        return np.zeros(num_ranks, np.int64)
    node = as_ints(node_of_rank)
    if node.shape != (num_ranks,):
        raise ValueError(f"node_of_rank must name the node of each of {num_ranks} ranks, got shape {node.shape}")
    return np.unique(node, return_inverse=True)[1].astype(np.int64)


def _speeds(speeds: Sequence[int] | None, num_ranks: int) -> Ints | None:
    """`[R]` speed of each rank; None where all are equal."""
    if speeds is None:
        return None
    speed = as_ints(speeds)
    if speed.shape != (num_ranks,) or (speed < 1).any():
        raise ValueError(
            f"speeds must name a positive integer for each of {num_ranks} ranks, in parts of {FULL_SPEED}, "
            f"got {np.asarray(speeds).tolist()}"
        )
    return None if (speed == speed[0]).all() else speed


def _allowed(peers: Any, num_ranks: int) -> Bools | None:
    """`[R, R]` bool: may rank r send to rank s; None where any may."""
    if peers is None:
        return None
    # Staying at home is always allowed.
    allowed = np.eye(num_ranks, dtype=np.bool_)
    if isinstance(peers, np.ndarray) and peers.dtype == np.bool_:
        if peers.shape != (num_ranks, num_ranks):
            raise ValueError(f"peers as a matrix must be [{num_ranks}, {num_ranks}], got {peers.shape}")
        return allowed | peers
    rows: Iterable[tuple[int, Any]] = peers.items() if isinstance(peers, Mapping) else enumerate(peers)
    for rank, others in rows:
        for other in others:
            if not (0 <= rank < num_ranks and 0 <= other < num_ranks):
                raise ValueError(f"peers name rank {rank} and {other}, there are {num_ranks} ranks")
            allowed[rank, other] = True
    return allowed
