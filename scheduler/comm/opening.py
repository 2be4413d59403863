"""Who does not come when the ranks open a scheduler: before there is a group, and so before there is a heartbeat."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ...core import PeerLostError
from .transports import TransportError

_OPENING, _GAVE_UP = b"opening", b"gave up"


@contextlib.contextmanager
def naming_absent(store: Any, name: str, *, rank: int, num_ranks: int, patience: float) -> Iterator[None]:
    """Open groups inside; where that takes too long, say which ranks are not there.

    Args:
        store: the job's key-value store.
        name: prefix of the keys, the same on every rank of the group and unique to the scheduler.
        rank: this rank within the group.
        num_ranks: size of the group.
        patience: seconds that one group may take.

    Raises:
        PeerLostError: ranks that did not begin, or gave up.
    """
    keys = [f"{name}/opening/{other}" for other in range(num_ranks)]
    store.set(keys[rank], _OPENING)
    started = time.monotonic()
    try:
        yield
    except (RuntimeError, TransportError) as error:
        # What fails at once is this rank's own trouble, a network interface say, whoever else has begun by now.
        is_late = time.monotonic() - started > 0.9 * patience or isinstance(error, TransportError)
        text = _absent(store, keys, rank, f"within {patience:g} s" if is_late else None)
        if text is None:
            raise
        raise PeerLostError(text) from error


def _absent(store: Any, keys: list[str], rank: int, within: str | None) -> str | None:
    """Return who is not there: only those that gave up where no time has passed."""
    try:
        # `get` waits for a key that is not there; `check` does not.
        signs = [store.get(key) if store.check([key]) else b"" for key in keys]
        store.set(keys[rank], _GAVE_UP)
    except (RuntimeError, dist.DistError):
        return "the store that rank 0 holds cannot be reached" if within else None
    missing = [f"rank {other}" for other, sign in enumerate(signs) if not sign]
    gone = [f"rank {other}" for other, sign in enumerate(signs) if sign == _GAVE_UP]
    if missing and within:
        return f"{', '.join(missing)} did not open a scheduler {within}"
    if gone:
        return f"{', '.join(gone)} gave up before rank {rank} opened its scheduler"
    return f"all ranks began to open their schedulers, and did not connect {within}" if within else None
