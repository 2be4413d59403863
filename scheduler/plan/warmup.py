"""Compile the kernels that plans under given settings need, or load them from numba's cache."""

from typing import get_args

import numpy as np

from . import bounds
from .packs import Packs
from .planner import plan_step
from .problem import build_problem
from .settings import Movement, PlanConfig, Sync
from .solvers.free import fit, pack, pack_in_turn
from .solvers.minimal_microbatch import homeward_microbatch
from .solvers.minimal_step import place_anywhere
from .solvers.refine import even_columns, even_ranks
from .table import SampleTable


def warm_up(config: PlanConfig | None = None, *, num_phases: int | None = None, has_peers: bool | None = None) -> None:
    """Compile or load kernels, so that no step pays for it; every kernel of plans in one piece by default.

    Args:
        config: compile only what plans under its `sync` and `movement` can call.
        num_phases: K of the costs; None for any.
        has_peers: whether ranks may send to some others only; None for either.
    """
    for sync in get_args(Sync) if config is None else (config.sync,):
        for movement in get_args(Movement) if config is None else (config.movement,):
            for phases in (1, 2) if num_phases is None else (min(num_phases, 2),):
                for limited in (False, True) if has_peers is None else (has_peers,):
                    _compile(PlanConfig(max_tokens=150, sync=sync, movement=movement, tolerance=0.0), phases, limited)


def _compile(config: PlanConfig, phases: int, has_peers: bool) -> None:
    """Plan a small table, and call what such a plan needs only where the first way does not fit."""
    lengths, count, ranks = np.arange(1, 41) * 37 % 61 + 1, 8, 3
    table = SampleTable.from_lengths(
        lengths, home=np.sort(np.arange(40) % ranks), cost=np.stack([lengths, lengths[::-1]][:phases], axis=1)
    )
    peers = [[1], [2], [0]] if has_peers else None
    plan_step(table, num_ranks=ranks, config=config, peers=peers)
    problem = build_problem(table, num_ranks=ranks, config=config, peers=peers)
    bounds.moved_bytes(problem, 0, 1)
    packs = Packs.empty(problem, count, False)
    fit(problem, packs, problem.by_size)
    if config.sync == "step":
        even_ranks(problem, packs, 0, goal=0)
    else:
        even_columns(problem, packs, across=False)
    if config.movement == "free" and not has_peers:
        pack(problem, count, False)
        if config.sync == "microbatch" and phases == 1:
            pack_in_turn(problem, count, False)
        return
    items = problem.summed_items if config.sync == "step" else problem.items
    goal = np.zeros((ranks, count, items.cost.shape[1]), np.int64)
    place_anywhere(problem, Packs.empty(problem, count, False), problem.by_size, goal, items, 0)
    if config.sync == "microbatch" and not has_peers:
        homeward_microbatch(problem, count, False, bounds.objective(problem))
