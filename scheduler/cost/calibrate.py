"""Calibrate the cost model from what was measured, the same on every rank, and from the same step on."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...models import ModelAdapter
from ..comm.transports import Transport, gather_bytes
from ..plan import MediaTowers
from ..stages.describe import SampleCost, media_towers
from .model import CostFit, CostModel, Observation


def fit_across_ranks(transport: Transport, observations: Sequence[Observation], free_step: int = 0) -> tuple[CostFit, int]:
    """Fit one cost model to the micro-batches of all ranks; collective.

    Costs decide the plan, so ranks must agree on them to the last bit. A least-squares solution need not be equal on two
    machines; so every rank takes rank 0's.

    Args:
        transport: collectives of the group, not used by another thread.
        observations: what this rank measured; may be empty.
        free_step: the first step that this rank has not begun to prepare.

    Returns:
        The fit, and the first step that no rank has begun to prepare; equal on every rank.

    Raises:
        ValueError: too few observations in all, or a time that is not positive; the same on every rank.
    """
    everyone = [
        observation
        for data in gather_bytes(transport, msgspec.msgpack.encode(list(observations)))
        for observation in msgspec.msgpack.decode(data, type=list[Observation])
    ]
    mine = CostModel.fit(everyone)
    answers = gather_bytes(transport, msgspec.msgpack.encode((mine, free_step)))
    found = [msgspec.msgpack.decode(data, type=tuple[CostFit, int]) for data in answers]
    return found[0][0], max(step for _, step in found)


class CostChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A cost model that takes the place of another.

    Attributes:
        from_step: number of the first step that is planned with it.
        cost: the model.
        towers: the adapter's media towers; the cost of dummy media follows the model.
        fingerprint: what ranks compare, to be sure that they plan with the same model; empty for the one that all began with.
    """

    from_step: int
    cost: SampleCost
    towers: MediaTowers
    fingerprint: bytes


class Costs:
    """The cost models of one scheduler: the one that it was built with, and those that were calibrated since.

    Args:
        adapter: the model family, whose dummy media have a cost.
        cost: the cost model of the first step.

    Attributes:
        towers: the adapter's media towers, with the cost of dummy media in the steps to come.
        ahead: changes that no step has been planned with yet, in order.
    """

    def __init__(self, adapter: ModelAdapter, cost: SampleCost) -> None:
        self._adapter, self._first = adapter, cost
        self._since: list[tuple[int, CostModel]] = []
        self.ahead: deque[CostChange] = deque()
        self.towers = media_towers(adapter, cost)

    def check(self, cost: SampleCost) -> None:
        """Raise `ValueError` for a model of other phases."""
        phases = tuple(self._first.phases)
        if tuple(cost.phases) != phases:
            raise ValueError(f"the cost model has phases {tuple(cost.phases)}, this scheduler plans {phases}")

    def change(self, model: CostModel, from_step: int) -> None:
        """Plan the steps from a number on, none of which is begun yet, with another model; from any thread."""
        self._since.append((from_step, model))
        self.ahead.append(self._changed(model, from_step))

    def due(self, step: int) -> CostChange | None:
        """Return the change that takes effect with a step that begins; None where the model stays."""
        change = None
        while self.ahead and self.ahead[0].from_step <= step:
            change = self.ahead.popleft()
        return change

    def state(self, step: int) -> dict[str, Any]:
        """Return, as plain data, the model of a step, None for the first one, and those of later steps."""
        self._since = [*[one for one in self._since if one[0] <= step][-1:], *[one for one in self._since if one[0] > step]]
        plain = [(from_step, msgspec.to_builtins(model)) for from_step, model in self._since]
        now = [model for from_step, model in plain if from_step <= step]
        return {"cost": now[0] if now else None, "cost_ahead": [one for one in plain if one[0] > step]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a state; its model is due at once."""
        step, now = state["step"], state.get("cost")
        models = [(step, None if now is None else msgspec.convert(now, CostModel))]
        models += [(from_step, msgspec.convert(model, CostModel)) for from_step, model in state.get("cost_ahead", ())]
        for _, model in models:
            self.check(model or self._first)
        self._since = [(from_step, model) for from_step, model in models if model is not None]
        self.ahead = deque(self._changed(model, from_step) for from_step, model in models)

    def _changed(self, model: CostModel | None, from_step: int) -> CostChange:
        cost = model or self._first
        self.towers = media_towers(self._adapter, cost)
        fingerprint = b"" if model is None else msgspec.msgpack.encode((model, sorted(self.towers.dummy_cost.items())))
        return CostChange(from_step=from_step, cost=cost, towers=self.towers, fingerprint=fingerprint)
