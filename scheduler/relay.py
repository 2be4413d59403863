"""Lets the worker thread have an operation run by the training thread, inside `next(scheduler)`.

Collectives of NCCL must start in one order on every rank, and only the training thread knows that order. So the worker hands
over the operations that use the device, and every call of `next` runs the same ones on every rank.
"""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .comm.transports import Aborted

T = TypeVar("T")


class Relay:
    """Operations that wait for the training thread.

    Attributes:
        num_gathers: gathers that were run.
    """

    def __init__(self) -> None:
        self.num_gathers = 0
        self._closed = False
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], bool, Future[Any]]] = queue.SimpleQueue()

    def call(self, operation: Callable[[], T], *, is_gather: bool = False) -> T:
        """Have an operation run; called by the worker, which waits for the result.

        Raises:
            Aborted: the relay was closed first.
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
        """Let a waiting worker go."""
        self._closed = True
