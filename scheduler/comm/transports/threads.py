"""Transport between threads of one process: simulated ranks, and a group of one."""

import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar, cast

import numpy as np
import torch

from .base import Aborted, TransportError

T = TypeVar("T")


class MemoryHub:
    """Where the simulated ranks of one group meet.

    Every collective is one round: each rank puts its payload, waits until all have, and takes what it needs.

    Args:
        num_ranks: ranks of the group.
        timeout: seconds that a round may take.

    Example:
        >>> MemoryHub(1).transport(0).gather(np.arange(3, dtype=np.uint8)).tolist()
        [[0, 1, 2]]
    """

    def __init__(self, num_ranks: int, *, timeout: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self._timeout = timeout
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, object]] = {}
        self._failure: str | None = None
        self._left: set[int] = set()

    def transport(self, rank: int) -> "MemoryTransport":
        """Return the transport of one rank."""
        return MemoryTransport(self, rank)

    def meet(self, rank: int, turn: int, payload: object, transport: "MemoryTransport") -> dict[int, object]:
        """Put a rank's payload of round `turn` and return everyone's.

        Raises:
            Aborted: the rank's transport was aborted while it waited.
            TransportError: other ranks did not come in time.
        """
        with self._changed:
            present = self._rounds.setdefault(turn, {})
            present[rank] = payload
            if len(present) == self.num_ranks:
                del self._rounds[turn]
            self._changed.notify_all()
            everyone = set(range(self.num_ranks))
            self._changed.wait_for(
                lambda: present.keys() == everyone or transport.aborted or self._failure or self._left - present.keys(),
                timeout=self._timeout,
            )
            if present.keys() == everyone:
                return present
            if transport.aborted:
                raise Aborted(f"round {turn}")
            if self._failure is not None:
                raise TransportError(self._failure)
            if gone := sorted(self._left - present.keys()):
                raise TransportError(f"ranks {gone} closed their schedulers before round {turn}")
            missing = sorted(everyone - present.keys())
            raise TransportError(f"round {turn} did not finish within {self._timeout:g} s, missing ranks {missing}")

    def fail(self, why: str) -> None:
        """Let every waiting rank raise."""
        self._failure = why
        self.wake()

    def leave(self, rank: int) -> None:
        """Let every rank that waits for this one raise."""
        self._left.add(rank)
        self.wake()

    def wake(self) -> None:
        """Let every waiting rank look whether it was aborted."""
        with self._changed:
            self._changed.notify_all()


class MemoryTransport:
    """One rank's side of a `MemoryHub`."""

    buffer_bytes = 0

    def __init__(self, hub: MemoryHub, rank: int) -> None:
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.aborted = False
        self._hub = hub
        self._turn = 0

    def gather(self, data: np.ndarray) -> np.ndarray:
        rows = self._meet(data.copy())
        sizes = {row.size for row in rows}
        assert len(sizes) == 1, f"ranks gather rows of different sizes {sizes}"
        return np.stack(rows)

    def alloc_send_buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.empty(sum(sizes), dtype=torch.uint8, device="cpu").split(list(sizes)))

    def exchange(self, parts: Sequence[torch.Tensor], receive_sizes: Sequence[int]) -> list[torch.Tensor]:
        # The sender may write to its parts afterwards: what is received must be a copy, as it is on a wire.
        received = [given[self.rank].clone() for given in self._meet(list(parts))]
        assert [part.numel() for part in received] == list(receive_sizes), receive_sizes
        return received

    def abort(self) -> None:
        self.aborted = True
        self._hub.wake()

    def close(self) -> None:
        self.aborted = True
        self._hub.leave(self.rank)

    def _meet(self, payload: T) -> list[T]:
        if self.aborted:
            raise Aborted(f"round {self._turn}")
        present = self._hub.meet(self.rank, self._turn, payload, self)
        self._turn += 1
        return [cast(T, present[rank]) for rank in range(self.num_ranks)]


class Simulation:
    """One run of simulated ranks: the hubs in which their groups meet."""

    _current = threading.local()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hubs: dict[Hashable, MemoryHub] = {}

    def enter(self) -> None:
        """Say that this thread is a rank of the simulation."""
        self._current.simulation, self._current.counts = self, Counter()

    def fail(self, why: str) -> None:
        """Let every rank that waits in a hub raise."""
        with self._lock:
            for hub in self._hubs.values():
                hub.fail(why)

    @classmethod
    def transport(cls, ranks: tuple[int, ...], rank: int, timeout: float) -> MemoryTransport | None:
        """Return a new transport over a group of the thread's simulation, or None if this thread is no simulated rank.

        Args:
            ranks: global ranks of the group.
            rank: this rank within the group.
            timeout: seconds that a round may take.
        """
        simulation: Simulation | None = getattr(cls._current, "simulation", None)
        if simulation is None:
            return None
        # Ranks make their transports in the same order, so the n-th over a group is the same one everywhere.
        cls._current.counts[ranks] += 1
        key = (ranks, cls._current.counts[ranks])
        with simulation._lock:
            hub = simulation._hubs.setdefault(key, MemoryHub(len(ranks), timeout=timeout))
        return hub.transport(rank)
