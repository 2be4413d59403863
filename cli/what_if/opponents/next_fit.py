"""Next-fit in arrival order, as Megatron-Core's DP-balanced packing scheduler does it."""

from ....scheduler.plan import MediaTowers, PlanConfig, SampleTable, StepPlan
from ....scheduler.plan.config import NO_TOWERS
from .common import Pack, to_plan


def pack(lengths: list[int], capacity: int) -> list[Pack]:
    """Fill a pack until the next sample does not fit; then open another."""
    packs: list[Pack] = [[]]
    room = capacity
    for index, length in enumerate(lengths):
        if length > room and packs[-1]:
            packs.append([])
            room = capacity
        packs[-1].append(index)
        room -= length
    return packs


def next_fit(
    table: SampleTable, *, num_ranks: int, config: PlanConfig, towers: MediaTowers = NO_TOWERS, **_: object
) -> StepPlan:
    """Packs in arrival order go to (micro-batch, rank) one after the other.

    Where their number is no multiple of the ranks, the last samples of the last packs become packs of their own.
    """
    packs = pack(table.padded.tolist(), config.max_tokens)
    missing = -len(packs) % num_ranks
    for position in range(len(packs) - 1, -1, -1):
        while missing and len(packs[position]) > 1:
            packs.append([packs[position].pop()])
            missing -= 1
    return to_plan(table, [packs[r::num_ranks] for r in range(num_ranks)], num_ranks=num_ranks, config=config, towers=towers)
