"""From table and settings to a problem: every check of the input is here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core import round_up
from ...core.errors import OversizeSampleError, PlanError
from .config import MEDIA_BITS, NO_TOWERS, MediaTowers, PlanConfig
from .integers import exact_sum
from .problem import LIMIT, NUM_SETS, Problem
from .table import Ints, SampleTable, as_ints


def build_problem(
    table: SampleTable,
    *,
    num_ranks: int,
    config: PlanConfig,
    towers: MediaTowers = NO_TOWERS,
    cp_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
    peers: Any = None,
) -> Problem:
    """Check everything and drop oversize samples where the policy says so.

    Raises:
        ValueError: sizes, peers or nodes that make no sense.
        PlanError: a table with values out of range.
        OversizeSampleError: a sample above the capacity under `oversize` "error" or "truncate".
    """
    for name, number in (("num_ranks", num_ranks), ("cp_size", cp_size)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    columns = _columns(table)
    align = config.segment_align(cp_size)
    pack_align = config.pack_align if config.pack_align is not None else align
    if pack_align % align:
        raise ValueError(f"pack_align={pack_align} must be a multiple of align={align} (cp_size={cp_size})")
    capacity = config.max_tokens * cp_size // pack_align * pack_align
    if capacity == 0:
        raise ValueError(f"capacity {config.max_tokens * cp_size} is below pack_align={pack_align}")
    _check_table(columns, num_ranks, align)
    cost = columns["cost"]
    stages = config.pipeline_stages
    for what, total in (
        ("costs of the step", exact_sum(cost) * stages),
        ("tokens of the step", exact_sum(columns["padded"])),
        ("bytes of the step", exact_sum(columns["nbytes"])),
    ):
        if total >= LIMIT:
            raise PlanError(f"the {what} add up to {total}, above the limit of {LIMIT}: use a coarser unit")
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
        # With one phase a copy costs a tenth of a sum over an axis of length one.
        weight=cost[:, 0].copy() if cost.shape[1] == 1 else cost.sum(axis=1),
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
    def broken_rows(name: str, low: int, above: int | None = None) -> npt.NDArray[np.bool_] | None:
        """Rows below `low` or from `above` on; None where there are none, which two passes without a mask tell."""
        column = columns[name]
        if not column.size or (column.min() >= low and (above is None or column.max() < above)):
            return None
        outside = column < low if above is None else (column < low) | (column >= above)
        rows: npt.NDArray[np.bool_] = np.any(outside.reshape(len(column), -1), axis=1)
        return rows

    checks = [
        ("tokens", broken_rows("tokens", 1), "at least 1"),
        ("padded", columns["padded"] < columns["tokens"], "at least the sample's tokens"),
        ("padded", columns["padded"] % align != 0 if align > 1 else None, f"a multiple of align={align}"),
        ("nbytes", broken_rows("nbytes", 0), "at least 0"),
        ("home", broken_rows("home", 0, num_ranks), f"a rank from 0 to {num_ranks - 1}"),
        ("media", broken_rows("media", 0, NUM_SETS), f"bit flags below {NUM_SETS}"),
        ("loss_tokens", broken_rows("loss_tokens", 0), "at least 0"),
        ("cost", broken_rows("cost", 0), "at least 0"),
    ]
    for name, broken, rule in checks:
        if broken is not None and broken.any():
            row = int(np.argmax(broken))
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


def _allowed(peers: Any, num_ranks: int) -> npt.NDArray[np.bool_] | None:
    """`[R, R]` bool: may rank r send to rank s; None where any may."""
    if peers is None:
        return None
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
