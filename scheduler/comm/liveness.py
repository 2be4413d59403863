"""Liveness of ranks: each writes a sign of life to the job's store, and reads the others' when a collective fails."""

import contextlib
import datetime
import threading
import time
import warnings
from typing import Any

import torch.distributed as dist

from ...core import PeerLostError

#: The last sign of a rank that left on purpose.
CLOSED = "closed"


class Heartbeat:
    """One rank's sign of life: a counter that a thread advances, and what the rank is doing.

    A backend's error names an address at best, and a time-out names no rank. The store outlives a rank, so it can be asked.

    Args:
        store: the job's key-value store, None if there is none (simulated ranks): then no rank is ever named.
        name: prefix of the keys, the same on every rank of the group and unique to the scheduler.
        rank: this rank within the group.
        num_ranks: size of the group.
        interval: seconds between two signs.
        patience: seconds without a sign after which a rank is named in a warning, though no collective waits for it: the
            training itself may wait for much longer.

    Attributes:
        stage: what this rank is doing; the next sign of life carries it.
        silent: ranks without a sign of life for `patience` seconds; rank 0 where its store cannot be reached.
    """

    def __init__(self, store: Any, *, name: str, rank: int, num_ranks: int, interval: float, patience: float) -> None:
        self._store = store
        self._patience = patience
        self.silent: tuple[int, ...] = ()
        # Made before anything is wrong: a store that hangs must not keep its asker.
        self._asking = None if store is None else _clone(store, patience=max(1.0, 5 * interval))
        self._name = name
        self._rank = rank
        self._num_ranks = num_ranks
        self._interval = interval
        self.stage = "starting"
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        if store is not None:
            # Two threads: a connection that is cut blocks whoever reads from it.
            self._threads = [
                threading.Thread(target=target, name=f"evenpack-{name}", daemon=True)
                for target, name in ((self._run, "heartbeat"), (self._watch, "liveness"))
            ]
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """Leave a last sign that says the rank left on purpose, and end the thread."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5 * self._interval)
        self._threads = []

    def missing(self) -> list[tuple[int, str]]:
        """Return the ranks that show no life, each with what it last said ("" if nothing); else those that closed.

        Reads every counter twice, three intervals apart. A rank that closed is most often another victim, so it is named
        only if no rank is silent.
        """
        if self._store is None:
            return []
        try:
            before = self._read(self._asking)
            time.sleep(3 * self._interval)
            after = self._read(self._asking)
        except (RuntimeError, dist.DistError):
            return [(0, "the store that rank 0 holds cannot be reached")]
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        closed = [rank for rank in others if after[rank].endswith(f" {CLOSED}")]
        silent = [rank for rank in others if after[rank] == before[rank] and rank not in closed]
        return [(rank, after[rank].partition(" ")[2]) for rank in silent or closed]

    def lost(self, error: BaseException, where: str) -> PeerLostError:
        """Return the error that names the ranks which a collective waited for in vain; the backend's own error is its cause.

        Args:
            error: what the transport, or the opening of a group, raised.
            where: what the ranks were doing, for the message.
        """
        missing = self.missing()
        if absent := [f"rank {rank}" for rank, sign in missing if not sign]:
            return PeerLostError(f"{', '.join(absent)} did not open a scheduler")
        if missing:
            names = ", ".join(f"rank {rank} (last: {sign})" for rank, sign in missing)
            return PeerLostError(f"{names} stopped answering at {where}")
        stages = self.stages()
        if not stages:  # nothing else is known
            return PeerLostError(f"timed out waiting for a rank at {where}: {error}")
        # Ranks in another stage than this one are late; if there are none, any may be.
        late = [(rank, stage) for rank, stage in stages if stage != self.stage] or stages
        names = ", ".join(f"rank {rank} (last: {stage})" for rank, stage in late)
        return PeerLostError(f"timed out at {where} waiting for {names}; all processes are alive")

    def stages(self) -> list[tuple[int, str]]:
        """Return what every other rank last said it was doing."""
        if self._store is None:
            return []
        try:
            signs = self._read(self._asking)
        except (RuntimeError, dist.DistError):
            return []
        return [(rank, sign.partition(" ")[2]) for rank, sign in enumerate(signs) if rank != self._rank]

    def _key(self, rank: int) -> str:
        return f"{self._name}/alive/{rank}"

    def _read(self, store: Any) -> list[str]:
        keys = [self._key(rank) for rank in range(self._num_ranks)]
        # One request for all, where the store can: every rank of a large job asks. `get` waits for a key that is not there;
        # `check` does not.
        if store.has_extended_api() and store.check(keys):
            return [sign.decode() for sign in store.multi_get(keys)]
        return [store.get(key).decode() if store.check([key]) else "" for key in keys]

    def _run(self) -> None:
        try:
            store = _clone(self._store)
            count = 0
            while not self._stop.is_set():
                count += 1
                store.set(self._key(self._rank), f"{count} {self.stage}")
                self._stop.wait(self._interval)
            store.set(self._key(self._rank), f"{count} {CLOSED}")
        except (RuntimeError, dist.DistError):
            return  # the store is gone, and with it the job: the collective that fails next says so

    def _watch(self) -> None:
        """Warn of ranks that fall silent, whatever this rank is doing."""
        seen: dict[int, tuple[str, float]] = {}
        store, num_failures = None, 0
        while not self._stop.wait(max(self._interval, self._patience / 4)):
            now = time.monotonic()
            try:
                # The clone waits for the store as long as a rank may be silent, and no longer.
                store = store or _clone(self._store, patience=max(1.0, self._patience / 2))
                signs, num_failures = self._read(store), 0
            except (RuntimeError, dist.DistError):
                store, num_failures = None, num_failures + 1
                # Once is no sign of trouble: a job that ends takes its store along.
                if num_failures > 1 and self._rank and not seen.get(0, ("", 0.0))[0].endswith(f" {CLOSED}"):
                    self._report([(0, "the store that it holds cannot be reached")])
                continue
            for rank, sign in enumerate(signs):
                if rank not in seen or seen[rank][0] != sign or sign.endswith(f" {CLOSED}"):
                    seen[rank] = (sign, now)
            late = [rank for rank, (_, since) in seen.items() if now - since >= self._patience and rank != self._rank]
            self._report([(rank, signs[rank].partition(" ")[2] or "no sign of life") for rank in late])

    def _report(self, late: list[tuple[int, str]]) -> None:
        known, self.silent = self.silent, tuple(rank for rank, _ in late)
        fresh = [f"rank {rank} (last: {stage})" for rank, stage in late if rank not in known]
        if fresh and not self._stop.is_set():
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors, this thread goes on all the same
                warnings.warn(
                    f"{', '.join(fresh)} showed no sign of life for {self._patience:g} s, seen from rank {self._rank}: what "
                    "waits for it, the training's own collectives too, may wait until their time-out",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _clone(store: Any, patience: float | None = None) -> Any:
    """Return an own connection: a store shared between threads would let one wait for the other."""
    own = store.clone() if hasattr(store, "clone") else store
    if patience is not None and own is not store:
        own.set_timeout(datetime.timedelta(seconds=patience))
    return own
