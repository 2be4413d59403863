"""Planners of other training frameworks, written from public descriptions of what they do, as planner functions.

Each takes what `plan_step` takes and returns a `StepPlan`; capacities that an algorithm does not respect are exceeded, and
`overflow` says by how much. None of their code is used here; names say where the algorithm is found.
"""

from collections.abc import Callable

from evenpack.cli.what_if.opponents.karmarkar_karp import karmarkar_karp_equal
from evenpack.integrations.megatron import next_fit_planner
from evenpack.scheduler.plan import StepPlan

from .first_fit import ffd_karmarkar_karp_swaps, first_fit_decreasing
from .longest_first import longest_first_swaps

#: Name to planner.
OPPONENTS: dict[str, Callable[..., StepPlan]] = {
    "next-fit (Megatron-Core)": next_fit_planner,
    "Karmarkar-Karp, equal counts (verl)": karmarkar_karp_equal,
    "first-fit decreasing (NeMo-RL)": first_fit_decreasing,
    "LPT and swaps (LoongForge)": longest_first_swaps,
    "FFD, KK and swaps (prime-rl)": ffd_karmarkar_karp_swaps,
}

__all__ = ["OPPONENTS"]
