"""A framework: its trainer asks for a loader, for the loss of a batch, and for a state to save; a step is its batch."""

from collections.abc import Iterator
from typing import Any

import torch

from evenpack.scheduler import PackedStep, PackingScheduler


class PackedModule:
    """What a trainer of the usual kind drives: `train_dataloader`, `training_step`, and the state of both.

    The trainer steps its optimizer once per batch of the loader. A batch is a whole step, so `training_step` runs forward and
    backward of every micro-batch itself, and the wrapper reduces gradients in the last one only.

    Args:
        model: the model, prepared and wrapped (DDP, FSDP2).
        scheduler: yields the steps.
        device: where the model lies.
    """

    def __init__(self, model: Any, scheduler: PackingScheduler, device: str = "cpu") -> None:
        self._model, self._scheduler, self._device = model, scheduler, device

    def train_dataloader(self) -> Iterator[PackedStep]:
        """Return what the trainer iterates, an epoch at a time."""
        return iter(self._scheduler)

    def training_step(self, step: PackedStep) -> torch.Tensor:
        """Return this rank's share of the step's loss, with its gradients in place."""
        total = torch.zeros((), device=self._device)
        for batch in (packed.to(self._device) for packed in step):
            with step.sync_on_last(self._model, batch):
                loss = step.loss(self._model(**batch.forward_kwargs(self._model)).logits, batch)
                loss.backward()
            total += loss.detach()
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return what the trainer saves on every rank, beside the weights."""
        return {"packing": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume, before the first step."""
        self._scheduler.load_state_dict(state["packing"])
