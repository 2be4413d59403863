"""The scheduler's state in the Trainer's checkpoints: one file per rank."""

from pathlib import Path
from typing import Any

import torch

from ...scheduler import PackingScheduler

#: File of one rank in a checkpoint's folder.
_PATTERN = "packing_state_{rank}.pt"


def save_state(scheduler: PackingScheduler, folder: str | Path, rank: int) -> None:
    """Save this rank's state."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(scheduler.state_dict(), Path(folder) / _PATTERN.format(rank=rank))


def load_state(scheduler: PackingScheduler, folder: str | Path, rank: int, num_ranks: int) -> None:
    """Go to the state of a checkpoint, saved by a job of any number of ranks.

    Raises:
        ValueError: a checkpoint without such a state.
    """
    files = sorted(Path(folder).glob(_PATTERN.format(rank="*")))
    if not files:
        raise ValueError(
            f"{folder} holds no state of the packing: it was saved by another Trainer, or with save_only_model=True"
        )
    if len(files) == num_ranks:
        scheduler.load_state_dict(_read(Path(folder) / _PATTERN.format(rank=rank)))
    else:
        scheduler.load_state_dicts([_read(file) for file in files])


def _read(file: Path) -> dict[str, Any]:
    # Plain data, but the state of a user's own source may be anything: as far to be trusted as the rest of a checkpoint.
    state: dict[str, Any] = torch.load(file, weights_only=False)
    return state
