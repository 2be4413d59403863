"""Prepare steps ahead of their use on one worker thread, and run on the training thread what must run there."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from .comm.transports import Aborted

T = TypeVar("T")


class MainThreadExecutor:
    """Runs operations of the worker thread on the training thread, inside `next(scheduler)`.

    Collectives of NCCL must start in one order on every rank, and only the training thread knows that order. So the worker
    hands over the operations that use the device, and every call of `next` runs the same ones on every rank.


    Attributes:
        num_gathers: gathers that were run.
    """

    def __init__(self) -> None:
        self.num_gathers = 0
        self._closed = False
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], bool, Future[Any]]] = queue.SimpleQueue()

    def run(self, operation: Callable[[], T], *, is_gather: bool = False) -> T:
        """Run an operation on the training thread and return its result; called by the worker thread.

        Raises:
            Aborted: the executor was closed first.
        """
        future: Future[T] = Future()
        self._requests.put((operation, is_gather, future))
        while True:
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                if future.done():
                    raise  # the operation's own
                if self._closed:
                    raise Aborted("the scheduler closed") from None

    def serve(self, enough: Callable[[], bool]) -> None:
        """Run operations in the order in which they were asked for, until `enough`; called by the training thread."""
        while not enough() and not self._closed:
            try:
                operation, is_gather, future = self._requests.get(timeout=1e-3)
            except queue.Empty:
                continue
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)
            self.num_gathers += is_gather

    def close(self) -> None:
        """Wake a waiting worker with `Aborted`."""
        self._closed = True


class Prefetcher(Generic[T]):
    """Calls `make` a fixed number of times ahead of `get`.

    Every `get` allows one further call, so after k of them exactly k + depth calls were allowed, on every rank: the
    collectives inside line up whatever the threads' speed.

    Args:
        make: prepares the next item.
        depth: items prepared ahead; 0 makes each item inside `get`, on the calling thread.
        name: name of the thread.
        executor: runs operations of `make` on the thread that calls `get`; None if it has none.
        ahead: what the worker may do before the next call of `make` is allowed.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        depth: int,
        name: str,
        executor: MainThreadExecutor | None = None,
        ahead: Callable[[], None] | None = None,
    ) -> None:
        self._make = make
        self._depth = depth
        self._ahead = ahead
        self._executor = executor
        self._gathers_before = executor.num_gathers if executor else 0
        self._allowed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ready: deque[tuple[T | None, BaseException | None]] = deque()
        self._arrived = threading.Event()
        self._num_allowed = 0
        self._num_made = 0
        self._num_used = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            for _ in range(depth):
                self._allow()

    def get(self) -> T:
        """Return the next item, or raise what making it raised; the item stays the next one until `used`.

        An interrupt at any point loses nothing: the next call returns the same item.

        Raises:
            RuntimeError: the prefetcher is closed.
        """
        if self._thread is None:
            if not self._ready:
                self._ready.append((self._make(), None))
            return self._ready[0][0]  # type: ignore[return-value]
        if self._num_allowed <= self._num_used + self._depth:
            self._allow()
        if self._executor is not None:
            # Up to the gather of the last step allowed, no further: what comes after it is due in the next call, however
            # early this rank's worker asks for it.
            self._executor.serve(self._served)
        while not self._ready:
            self._arrived.wait(timeout=0.2)  # wakes up for Ctrl-C, and for a close by another thread
            self._arrived.clear()
            if self._closed and not self._ready:
                raise RuntimeError("the scheduler was closed while it waited for a step")
        item, error = self._ready[0]
        if error is not None:
            raise error
        return item  # type: ignore[return-value]

    def used(self) -> None:
        """Say that the item that `get` returned was taken over."""
        self._num_used += 1
        self._ready.popleft()

    @property
    def num_ahead(self) -> int:
        """Calls of `make` that are allowed, made or not, whose items were not used."""
        return max(self._num_allowed - self._num_used, len(self._ready))

    def settle(self) -> None:
        """Wait until everything that was allowed is made; what it leaves for the calling thread is run."""

        def settled() -> bool:
            return self._num_made >= self._num_allowed or not self._is_running()

        if self._executor is not None:
            self._executor.serve(settled)
        while not settled():
            time.sleep(1e-3)

    def close(self, timeout: float) -> bool:
        """End the thread; what it waits for must have been aborted.

        Returns:
            Whether the thread ended within `timeout` seconds.
        """
        self._closed = True
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._allowed.put(False)
        self._thread.join(timeout)
        self._ready.clear()  # they are not needed any more, and an error refers to this object, by its traceback
        return not self._thread.is_alive()

    def _allow(self) -> None:
        self._num_allowed += 1
        self._allowed.put(True)

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _served(self) -> bool:
        assert self._executor is not None
        gathers = self._executor.num_gathers - self._gathers_before
        return max(gathers, self._num_made) >= self._num_allowed or not self._is_running()

    def _run(self) -> None:
        while True:
            if self._ahead is not None:
                self._ahead()
            if not self._allowed.get() or self._closed:
                return
            try:
                made = (self._make(), None)
            except BaseException as error:
                self._ready.append((None, error))
                self._arrived.set()
                return
            self._num_made += 1
            self._ready.append(made)
            self._arrived.set()
            del made  # or it would live on in the traceback of an error in the next one
