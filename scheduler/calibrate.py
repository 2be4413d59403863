"""Calibrate the cost model from what was measured, the same on every rank."""

from collections.abc import Sequence

import msgspec

from .cost import CostFit, CostModel, Observation
from .transports import Transport, gather_bytes


def fit_across_ranks(transport: Transport, observations: Sequence[Observation]) -> CostFit:
    """Fit one cost model to the micro-batches of all ranks; collective.

    Costs decide the plan, so ranks must agree on them to the last bit. A least-squares solution need not be equal on two
    machines; so every rank takes rank 0's.

    Args:
        transport: collectives of the group, not used by another thread.
        observations: what this rank measured; may be empty.

    Raises:
        ValueError: too few observations in all, or a time that is not positive; the same on every rank.
    """
    everyone = [
        observation
        for data in gather_bytes(transport, msgspec.msgpack.encode(list(observations)))
        for observation in msgspec.msgpack.decode(data, type=list[Observation])
    ]
    mine = CostModel.fit(everyone)
    return msgspec.msgpack.decode(gather_bytes(transport, msgspec.msgpack.encode(mine))[0], type=CostFit)
