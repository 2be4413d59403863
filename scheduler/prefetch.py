"""Prepare steps ahead of their use, on one worker thread."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls `make` a fixed number of times ahead of `get`.

    Every `get` allows one further call, so after k of them exactly k + depth calls were made, on every rank: the collectives
    inside line up whatever the threads' speed.

    Args:
        make: prepares the next item.
        depth: items prepared ahead; 0 makes each item inside `get`, on the calling thread.
        name: name of the thread.
    """

    def __init__(self, make: Callable[[], T], *, depth: int, name: str) -> None:
        self._make = make
        self._depth = depth
        self._grants: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        if depth:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            for _ in range(depth):
                self._grants.put(True)

    def get(self) -> T:
        """Return the next item, or raise what making it raised.

        Raises:
            RuntimeError: the prefetcher is closed.
        """
        if self._closed:
            raise RuntimeError("the scheduler is closed")
        if self._thread is None:
            return self._make()
        self._grants.put(True)
        while True:
            try:
                item, error = self._ready.get(timeout=0.2)  # wakes up for Ctrl-C, and for a close by another thread
                break
            except queue.Empty:
                if self._closed:
                    raise RuntimeError("the scheduler was closed while it waited for a step") from None
        if error is not None:
            raise error
        return item  # type: ignore[return-value]

    def close(self, timeout: float) -> bool:
        """End the thread; what it waits for must have been aborted.

        Returns:
            Whether the thread ended within `timeout` seconds.
        """
        self._closed = True
        if self._thread is None:
            return True
        self._grants.put(False)
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._grants.get() and not self._closed:
            try:
                self._ready.put((self._make(), None))
            except BaseException as error:
                self._ready.put((None, error))
                return
