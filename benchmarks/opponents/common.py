"""Parts that several opponents share."""

from evenpack.cli.what_if.opponents.common import Pack
from evenpack.scheduler.plan import StepPlan


def pack_in_order(lengths: list[int], capacity: int) -> list[Pack]:
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


def overflow(plan: StepPlan, capacity: int) -> float:
    """How far the fullest pack lies above the capacity: 0.1 is 10%."""
    return max(int(plan.padded.max()) / capacity - 1, 0.0)


def split_to_multiple(packs: list[Pack], multiple: int) -> list[Pack]:
    """Make the number of packs a multiple by moving last samples of the packs with most samples into packs of their own."""
    target = -(-max(len(packs), 1) // multiple) * multiple
    packs = [list(pack) for pack in packs]
    while len(packs) < target:
        donor = max(range(len(packs)), key=lambda k: len(packs[k]), default=-1)
        if donor < 0 or len(packs[donor]) < 2:
            packs.append([])
        else:
            packs.append([packs[donor].pop()])
    return packs
