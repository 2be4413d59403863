"""Megatron-Energon's savable loaders."""

from collections.abc import Iterator
from typing import Any


class EnergonSource:
    """A Megatron-Energon `SavableDataLoader`; its rank-local state is all it needs.

    Args:
        loader: what `megatron.energon.get_savable_loader` returns.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> Any:
        """Return the loader's state of this rank."""
        return self._loader.save_state_rank()

    def load_state_dict(self, state: Any) -> None:
        """Restore the loader's state of this rank; the loader must not have been read yet."""
        self._loader.restore_state_rank(state)
