"""The scheduler as the data loader that a Trainer iterates over: one `PackedStep` is one batch."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ...scheduler import PackedStep, PackingScheduler


class StepStream(IterableDataset[PackedStep | None]):
    """The steps of a scheduler, epoch by epoch.

    Args:
        scheduler: the scheduler; the stream closes it.
        num_samples: samples of an epoch over all ranks, None where that is unknown.
        num_steps: steps of an epoch, None where that is unknown.

    Attributes:
        scheduler: the scheduler.
        placeholders: steps that the Trainer skips after a resume, because it believes to start at the beginning of the
            epoch. The scheduler stands behind them already, so it is handed None for each.
    """

    def __init__(self, scheduler: PackingScheduler, *, num_samples: int | None, num_steps: int | None) -> None:
        self.scheduler = scheduler
        self.num_samples = num_samples
        self.num_steps = num_steps
        self.placeholders = 0

    def __len__(self) -> int:
        """Number of steps of an epoch.

        Raises:
            TypeError: it is not known; the Trainer then needs `max_steps`.
        """
        if self.num_steps is None:
            raise TypeError("the number of steps of an epoch is not known: set max_steps")
        return self.num_steps

    def __iter__(self) -> Iterator[PackedStep | None]:
        skipped, self.placeholders = self.placeholders, 0
        yield from [None] * skipped
        count = 0
        for _ in range(2):
            # The Trainer asks for as many steps as it expects, not for the end behind them, which then comes first here.
            for step in self.scheduler:
                count += 1
                yield step
            if count:
                return

    def close(self) -> None:
        """Close the scheduler."""
        self.scheduler.close()


def loader_of(stream: StepStream) -> DataLoader[PackedStep | None]:
    """Return a loader that hands out a stream's steps as they are."""
    return DataLoader(stream, batch_size=None, collate_fn=_as_it_is, pin_memory=False)


def epoch_steps(num_samples: int | None, num_ranks: int, scheduler: PackingScheduler) -> int | None:
    """Return how many steps an epoch takes, None where settings leave that open.

    Args:
        num_samples: samples of the dataset, None where it has no length.
        num_ranks: ranks that share it.
        scheduler: the scheduler.
    """
    config = scheduler.config
    per_step = config.samples_per_step
    if num_samples is None or per_step is None or config.oversize == "drop":
        return None
    if config.on_exhausted == "stop":
        return num_samples // num_ranks // per_step
    return -(-num_samples // (num_ranks * per_step))


def _as_it_is(step: Any) -> Any:
    return step
