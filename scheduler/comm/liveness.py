"""Liveness of ranks: each writes a sign of life to the job's store, and reads the others' when a collective fails."""

import contextlib
import datetime
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ...core import PeerLostError
from .transports import TransportError

_CLOSED = "closed"
_OPENING, _GAVE_UP = b"opening", b"gave up"


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
        """Return the ranks that show no life, each with what it last said; else those that closed their scheduler.

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
        closed = [rank for rank in others if after[rank].endswith(f" {_CLOSED}")]
        silent = [rank for rank in others if after[rank] == before[rank] and rank not in closed]
        return [(rank, after[rank].partition(" ")[2] or "no sign of life") for rank in silent or closed]

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
            store.set(self._key(self._rank), f"{count} {_CLOSED}")
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
                if num_failures > 1 and self._rank and not seen.get(0, ("", 0.0))[0].endswith(f" {_CLOSED}"):
                    self._report([(0, "the store that it holds cannot be reached")])
                continue
            for rank, sign in enumerate(signs):
                if rank not in seen or seen[rank][0] != sign or sign.endswith(f" {_CLOSED}"):
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


@contextlib.contextmanager
def report_missing_ranks(store: Any, name: str, *, rank: int, num_ranks: int, patience: float) -> Iterator[None]:
    """Open process groups inside the context; if that takes too long, raise an error that names the missing ranks.

    At this point there is no group yet, and so no heartbeat.

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
