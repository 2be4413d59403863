"""Simulated ranks for tests: threads of this process, or forked processes that talk over gloo."""

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .comm.transports.threads import Simulation
from .plan.settings import check_int, check_literal

T = TypeVar("T")
Backend = Literal["threads", "gloo"]


class RankError(RuntimeError):
    """A rank that died, or did not return in time."""


def run_ranks(
    fn: Callable[[int, int], T],
    num_ranks: int,
    *,
    backend: Backend = "threads",
    timeout: float = 60,
    return_exceptions: bool = False,
) -> list[T]:
    """Call `fn(rank, num_ranks)` on every rank, with a default process group up.

    Args:
        fn: runs on every rank. With "gloo" its result is pickled.
        num_ranks: number of ranks.
        backend: "threads" simulates ranks in this process, which is fast and goes to hundreds of them; "gloo" forks one
            process per rank, with real collectives over loopback, which is what DDP and FSDP need.
        timeout: seconds that all of it may take.
        return_exceptions: put a rank's exception in its place of the list instead of raising the first.

    Returns:
        Results in rank order.

    Raises:
        Exception: the first error that a rank raised.
        RankError: a rank died without a word, or did not return in time.

    Example:
        >>> run_ranks(lambda rank, num_ranks: (rank, num_ranks), 3)
        [(0, 3), (1, 3), (2, 3)]
    """
    check_literal("backend", backend, get_args(Backend))
    check_int("num_ranks", num_ranks, 1)
    run = _run_threads if backend == "threads" else _run_processes
    outcomes = run(fn, num_ranks, timeout)
    if not return_exceptions:
        failures = [(when, error) for when, error in outcomes if isinstance(error, _Raised)]
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1].error
    return [outcome.error if isinstance(outcome, _Raised) else outcome for _, outcome in outcomes]  # type: ignore[misc]


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_Outcome = tuple[float, Any]


def _run_threads(fn: Callable[[int, int], Any], num_ranks: int, timeout: float) -> list[_Outcome]:
    # The module is private to torch, and the only process group that runs as threads of one process.
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    simulation, store = Simulation(), dist.HashStore()
    outcomes: list[_Outcome] = [(float("inf"), _Raised(RankError(f"rank {r} did not return"))) for r in range(num_ranks)]
    # Without isolation, the second group of a name that another thread registered is refused.
    isolate = getattr(getattr(torch._C, "_distributed_c10d", None), "_set_thread_isolation_mode", lambda _: None)
    isolate(True)
    threaded._install_threaded_pg()

    def body(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            simulation.enter()
            outcomes[rank] = (time.monotonic(), fn(rank, num_ranks))
        except BaseException as error:
            outcomes[rank] = (time.monotonic(), _Raised(error))
            # A rank that raised would leave the others waiting in their collectives.
            simulation.fail(f"rank {rank} raised {type(error).__name__}: {error}")
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(num_ranks)]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            simulation.fail(f"the run exceeded its {timeout:g} s")
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    return outcomes


def _run_processes(fn: Callable[[int, int], Any], num_ranks: int, timeout: float) -> list[_Outcome]:
    context = mp.get_context("fork")
    results = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ports = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    children = [
        context.Process(target=_child, args=(fn, rank, num_ranks, ports[rank][0], results[rank][1]), daemon=True)
        for rank in range(num_ranks)
    ]
    for child, (_, writer) in zip(children, results, strict=True):
        child.start()
        writer.close()
    # The parent holds the store, so that it outlives any rank; port 0 takes a free one. It is started after the fork: a
    # child of a process whose store thread holds a lock would wait for that lock forever.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for _, sender in ports:
        sender.send(store.port)
    deadline = time.monotonic() + timeout
    try:
        return [
            _outcome(rank, child, reader, deadline, timeout)
            for rank, (child, (reader, _)) in enumerate(zip(children, results, strict=True))
        ]
    finally:
        for child in children:
            child.join(max(0.1, min(5.0, deadline - time.monotonic())))
            if child.is_alive():
                child.kill()
                child.join()


def _outcome(rank: int, child: Any, reader: Any, deadline: float, timeout: float) -> _Outcome:
    if not reader.poll(max(0.0, deadline - time.monotonic())):
        return float("inf"), _Raised(RankError(f"rank {rank} did not return within {timeout:g} s"))
    try:
        when, ok, data = reader.recv()
    except EOFError:
        child.join(1.0)
        return time.monotonic(), _Raised(RankError(f"rank {rank} died with exit code {child.exitcode}"))
    return when, pickle.loads(data) if ok else _Raised(pickle.loads(data))


def _child(fn: Callable[[int, int], Any], rank: int, num_ranks: int, port_reader: Any, pipe: Any) -> None:
    port = port_reader.recv()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)  # more of them can hang after a fork
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store)
        message = (True, _dump(fn(rank, num_ranks)))
    except BaseException as error:
        message = (False, _dump_error(error, rank))
    pipe.send((time.monotonic(), *message))
    pipe.close()
    # Without this, a rank whose peers are gone waits in the destructors of its groups.
    os._exit(0)


def _dump(value: object) -> bytes:
    # Plain pickle copies tensors; the pickler of multiprocessing would share memory that dies with the process.
    return pickle.dumps(value)


def _dump_error(error: BaseException, rank: int) -> bytes:
    error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
    try:
        pickle.loads(data := pickle.dumps(error))
    except Exception:
        return pickle.dumps(RankError(f"rank {rank}: {type(error).__name__}: {error}"))
    return data
