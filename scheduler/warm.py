"""Compile the planner before the first step, and say so where it takes long."""

import functools
import os
import sys
from collections.abc import Callable

from numba.core import event

from .plan import warm_up

TEXT = "evenpack: compiling the planner, about a minute, once"


def warm_up_once(rank: int, *, warm: Callable[[], None] | None = None) -> None:
    """Compile or load the planner's kernels, once in a process; the first rank of each node tells where none are kept.

    Args:
        rank: this rank within its group, which tells where the launcher does not say which ranks share a node.
        warm: what compiles, None for the planner's `warm_up`.
    """
    if warm is None and _warm_up.cache_info().currsize:
        return
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", str(rank)))
    with event.install_listener("numba:compile", _Teller(silent=local != "0")):
        (warm or _warm_up)()


class _Teller(event.Listener):  # type: ignore[misc] # numba has no types
    """Tells of the first kernel that is compiled; loading one from the cache is no such event."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent

    def on_start(self, event: object) -> None:
        if not self._silent:
            print(TEXT, file=sys.stderr, flush=True)
        self._silent = True

    def on_end(self, event: object) -> None:
        pass


@functools.cache
def _warm_up() -> None:
    warm_up()
