"""Compile the planner before the first step, only what the settings need, and say so where it takes long."""

import functools
import os
import sys
import time
from collections.abc import Callable

from numba.core import event

from .config import SchedulerConfig
from .plan import PlanConfig, warm_up
from .plan.settings import Movement, Sync

TEXT = "evenpack: compiling the planner, some 15 seconds, once"


def warm_up_once(rank: int, config: SchedulerConfig, *, num_phases: int = 1, warm: Callable[..., None] = warm_up) -> None:
    """Compile or load the kernels that steps need, once in a process; the first rank of each node tells where none are kept.

    Args:
        rank: this rank within its group, which tells where the launcher does not say which ranks share a node.
        config: settings; kernels that their plans cannot call are left alone.
        num_phases: K of the costs.
        warm: what compiles.
    """
    if config.scope == "microbatch":
        return  # lists are packed as they come: nothing is planned
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", str(rank)))
    has_peers = config.transport == "device" or config.scope == "rank"
    with event.install_listener("numba:compile", _Progress(silent=local != "0")) as progress:
        _warm_up(warm, config.sync, config.movement, min(num_phases, 2), has_peers)
        progress.finish()


class _Progress(event.Listener):  # type: ignore[misc] # numba has no types
    """Tells that the first kernel is compiled, and when all are; loading one from the cache is no such event."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._started: float | None = None

    def on_start(self, event: object) -> None:
        if self._started is None:
            self._started = time.monotonic()
            if not self._silent:
                print(TEXT, file=sys.stderr, flush=True)

    def on_end(self, event: object) -> None:
        pass

    def finish(self) -> None:
        """Tell how long it took, where anything was compiled."""
        if self._started is not None and not self._silent:
            print(f"evenpack: compiled in {time.monotonic() - self._started:.0f} s", file=sys.stderr, flush=True)


@functools.cache
def _warm_up(warm: Callable[..., None], sync: Sync, movement: Movement, num_phases: int, has_peers: bool) -> None:
    warm(PlanConfig(max_tokens=1, sync=sync, movement=movement), num_phases=num_phases, has_peers=has_peers)
