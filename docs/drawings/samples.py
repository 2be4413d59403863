"""Samples that the drawings plan: four ranks, each of which reads data of another kind."""

import numpy as np

from evenpack.scheduler import PlanConfig, SampleTable, StepPlan, plan_step

NUM_RANKS, MAX_TOKENS = 4, 4096
#: Tokens of the samples of every rank: captions, chats, documents, one long video.
LENGTHS = (
    (260, 310, 180, 420, 240, 350, 290, 200),
    (700, 950, 520, 1100, 640, 880),
    (1500, 2300, 1900, 1200),
    (3900, 2600, 450, 380),
)
CONFIG = PlanConfig(max_tokens=MAX_TOKENS)


def table_of(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> SampleTable:
    """Return the table of a step: attention makes a sample of 4,096 tokens cost half as much again as its length."""
    tokens = np.concatenate([np.array(one) for one in lengths])
    home = np.repeat(np.arange(len(lengths)), [len(one) for one in lengths])
    return SampleTable.from_lengths(tokens, home=home, cost=tokens + tokens**2 // (2 * MAX_TOKENS))


def alone(table: SampleTable, num_ranks: int = NUM_RANKS) -> list[StepPlan]:
    """Return the plan of every rank that packs only what it has read."""
    plans = []
    for rank in range(num_ranks):
        mine = np.flatnonzero(table.home == rank)
        own = SampleTable.from_lengths(table.tokens[mine], cost=table.cost[mine])
        plans.append(plan_step(own, num_ranks=1, config=CONFIG))
    return plans
