"""Ranks of one node hand each other bytes through memory; what arrives is what the network would have brought."""

import gc
import os
import resource
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenpack.scheduler.comm.transports import Aborted, HostTransport, open_gloo
from evenpack.scheduler.comm.transports import shared_memory as node
from evenpack.scheduler.comm.transports.arena import NUM_SECTIONS, Arena, PeerArena
from evenpack.scheduler.prefetch import Prefetcher
from evenpack.scheduler.testing import run_ranks

from ..helpers import VISION, flat, mixed_source, names_of, open_scheduler


def opened(rank, num_ranks, *, name="test", share=True):
    """Return a transport over all ranks."""
    store = dist.distributed_c10d._get_default_store()
    return HostTransport(open_gloo(store, name, rank, num_ranks, 20.0), timeout=20.0, share=share)


def payload(sender, receiver, size, turn=0):
    """Return bytes that only this sender sends to this receiver in this turn."""
    return torch.from_numpy(np.random.default_rng([sender, receiver, turn]).integers(0, 256, size, np.uint8))


def exchanged(transport, sizes, turn=0, *, in_room=True):
    """Exchange `sizes[sender][receiver]` bytes."""
    rank, num_ranks = transport.rank, transport.num_ranks
    parts = [payload(rank, peer, sizes[rank][peer], turn) for peer in range(num_ranks)]
    if in_room:
        given, parts = parts, transport.alloc_send_buffers(sizes[rank])
        for part, one in zip(parts, given, strict=True):
            part.copy_(one)
    return transport.exchange(parts, [sizes[peer][rank] for peer in range(num_ranks)])


def is_right(received, rank, sizes, turn=0):
    """Return whether every rank's bytes came."""
    return all(torch.equal(got, payload(peer, rank, sizes[peer][rank], turn)) for peer, got in enumerate(received))


SIZES = np.random.default_rng(0).choice([0, 1, 15, 16, 48, 4096, 100_001], (5, 5)).tolist()


@pytest.mark.parametrize("in_room", [True, False])
@pytest.mark.parametrize(
    ("nodes", "near"),
    [
        ("aaaaa", [4, 4, 4, 4, 4]),
        ("aabbb", [1, 1, 2, 2, 2]),
        ("ababa", [2, 1, 2, 1, 2]),
        ("abbbc", [0, 2, 2, 2, 0]),
        ("abcde", [0, 0, 0, 0, 0]),
    ],
)
def test_bytes_arrive_whatever_the_nodes(nodes, near, in_room, monkeypatch):
    def fn(rank, num_ranks):
        monkeypatch.setattr(node, "node_name", lambda: nodes[rank])
        transport = opened(rank, num_ranks)
        right = []
        for turn in range(8):
            sizes = np.roll(SIZES, turn).reshape(5, 5).tolist()
            right.append(is_right(exchanged(transport, sizes, turn, in_room=in_room), rank, sizes, turn))
        wire = sum(transport._sends)
        transport.close()
        return len(transport.near), all(right), wire

    outcomes = run_ranks(fn, 5, backend="gloo")
    assert [(count, right) for count, right, _ in outcomes] == [(count, True) for count in near]
    if nodes == "aaaaa":  # only notes, and what a rank sends to itself, are left to the network
        sizes = np.roll(SIZES, 7).reshape(5, 5)
        assert [wire for *_, wire in outcomes] == [
            int(sizes[r, r] + node.NOTE_BYTES * np.count_nonzero(np.delete(sizes[r], r))) for r in range(5)
        ]


def test_what_was_received_stays_as_it_is_for_as_long_as_it_is_kept():
    """More steps are kept than there are sections: the sender neither waits for ever nor writes over them."""
    turns = 3 * NUM_SECTIONS

    def fn(rank, num_ranks):
        transport = opened(rank, num_ranks)
        sizes = [[5000 + 16 * (rank + peer) for peer in range(num_ranks)] for rank in range(num_ranks)]
        kept = [[part[16:].view(torch.int16) for part in exchanged(transport, sizes, turn)] for turn in range(turns)]
        right = all(
            torch.equal(part, payload(peer, rank, sizes[peer][rank], turn)[16:].view(torch.int16))
            for turn, parts in enumerate(kept)
            for peer, part in enumerate(parts)
        )
        looked_into = transport._node._peers[1 - rank]
        spans = [(data.ctypes.data, data.ctypes.data + data.size) for data in looked_into._data]
        addresses = [any(low <= parts[1 - rank].data_ptr() < high for low, high in spans) for parts in kept]
        transport.close()
        return right, sum(addresses)

    # The last section is never lent for long, or a sender would have none left.
    assert run_ranks(fn, 2, backend="gloo") == [(True, NUM_SECTIONS - 1)] * 2


def test_memory_is_used_again_once_nothing_refers_to_it():
    def fn(rank, num_ranks):
        transport = opened(rank, num_ranks)
        sizes = [[100_000] * num_ranks] * num_ranks
        held = []
        for turn in range(20):
            received = exchanged(transport, sizes, turn)
            assert is_right(received, rank, sizes, turn)
            del received
            held.append(transport.buffer_bytes)
        transport.close()
        return held

    for held in run_ranks(fn, 3, backend="gloo"):
        # Three parts each: what is sent, twice, because a rank may be one exchange ahead of a reader, and what is received.
        assert max(held) <= 3 * 9 / 8 * 300_064


@pytest.mark.parametrize(
    "look",
    [
        lambda found: found,
        lambda found: found[3:],
        lambda found: found[16:][16:].view(np.int16).reshape(2, -1),
        lambda found: memoryview(found)[3:],
        lambda found: torch.from_numpy(found[:32]).view(torch.int64)[1:],
        lambda found: np.ndarray((4,), np.int32, torch.from_numpy(found).numpy(), 16),
    ],
)
def test_memory_is_used_again_once_no_view_of_any_kind_is_left(look):
    arena = Arena(1)
    memory = node.NodeMemory(arena, 0, {0: PeerArena(os.getpid(), arena.fd, arena.token, 1)})
    memory.alloc({0: 64}, {0: 0})
    view = look(memory.read(0, memory.notes()[0], 64, np.empty))
    assert arena.done.tolist() == [[0]] * NUM_SECTIONS
    del view
    assert arena.done.tolist() == [[1]] + [[0]] * (NUM_SECTIONS - 1)
    memory.close()


def test_a_fork_that_drops_what_it_inherited_frees_nothing():
    """A data loader forks its workers while received samples are alive."""

    def fn(rank, num_ranks):
        transport = opened(rank, num_ranks)
        sizes = [[100_000] * num_ranks] * num_ranks
        received = exchanged(transport, sizes)
        if (child := os.fork()) == 0:
            del received
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        for turn in range(1, 4):
            exchanged(transport, sizes, turn)
        transport.close()
        return is_right(received, rank, sizes)

    assert run_ranks(fn, 2, backend="gloo") == [True] * 2


def test_a_fork_packs_no_step_that_it_inherited():
    """Once its parent drops the step, what the samples lie in is written to again."""

    def fn(rank, num_ranks):
        with open_scheduler(mixed_source(rank, 6), adapter=VISION) as scheduler:
            step = next(scheduler)
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    list(step)
                except RuntimeError as error:
                    os.write(writer, str(error).encode())
                os._exit(0)
            os.close(writer)
            os.waitpid(child, 0)
            with os.fdopen(reader) as told:
                return (
                    told.read()
                    == f"packs must be built in the process that owns the step ({os.getpid()}), not in a fork ({child})"
                )

    assert run_ranks(fn, 2, backend="gloo") == [True] * 2


def test_one_tensor_for_several_ranks_is_written_once():
    def fn(rank, num_ranks):
        transport = opened(rank, num_ranks)
        told = torch.full((50_000,), rank, dtype=torch.uint8)
        received = transport.exchange([told[:0] if peer == rank else told for peer in range(num_ranks)],
                                      [50_000 * (peer != rank) for peer in range(num_ranks)])  # fmt: skip
        nbytes = transport._node.nbytes
        found = [part.unique().tolist() for part in received]
        for part in received:
            part += 1  # must not be seen by the others
        transport.gather(np.zeros(1, np.uint8))
        right = all((part == peer + 1).all() for peer, part in enumerate(received))
        transport.close()
        return found, nbytes < 2 * 50_000 and right

    expected = [[[] if peer == rank else [peer] for peer in range(3)] for rank in range(3)]
    assert run_ranks(fn, 3, backend="gloo") == [(each, True) for each in expected]


def no_memory_files(rank, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")


def no_view_of_the_others(rank, monkeypatch):
    if rank == 1:
        monkeypatch.setattr(node, "PeerArena", lambda *_: (_ for _ in ()).throw(PermissionError("no")))


def another_file_under_the_number(rank, monkeypatch):
    original = PeerArena.__init__
    if rank == 2:
        monkeypatch.setattr(PeerArena, "__init__", lambda self, pid, fd, *rest: original(self, pid, 0, *rest))


def another_arena_under_the_number(rank, monkeypatch):
    original = PeerArena.__init__
    if rank == 0:
        monkeypatch.setattr(PeerArena, "__init__", lambda self, pid, fd, token, n: original(self, pid, fd, bytes(16), n))


@pytest.mark.parametrize(
    "obstacle", [no_memory_files, no_view_of_the_others, another_file_under_the_number, another_arena_under_the_number]
)
def test_where_memory_cannot_be_shared_all_ranks_use_the_network(obstacle, monkeypatch):
    def fn(rank, num_ranks):
        obstacle(rank, monkeypatch)
        transport = opened(rank, num_ranks)
        right = is_right(exchanged(transport, [row[:3] for row in SIZES]), rank, [row[:3] for row in SIZES])
        arenas = left()
        transport.close()
        return transport.near, right, arenas

    assert run_ranks(fn, 3, backend="gloo") == [(frozenset(), True, [])] * 3


def descriptors():
    """Return what this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def left():
    """Return what this process has open or mapped of any arena."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*mapped, *descriptors()) if "memfd:evenpack" in line]


def test_nothing_is_left_behind():
    """A scheduler that is closed and kept, in a process that does not collect garbage."""

    def fn(rank, num_ranks):
        gc.disable()
        source = mixed_source(rank, 24)
        with open_scheduler(source, adapter=VISION, movement="free", max_tokens=400) as scheduler:
            near = len(scheduler._channel.blocks.near)
            names = [names_of(step) for step in scheduler]
        with open_scheduler(source, adapter=VISION, movement="free", max_tokens=400, prefetch=2) as cut_short:
            next(cut_short)
            cut_short._prefetcher.settle()
        return near, names, left(), scheduler.buffer_bytes + cut_short.buffer_bytes

    outcomes = run_ranks(fn, 3, backend="gloo")
    assert sorted(flat([names for _, names, *_ in outcomes])) == sorted(f"{r}-{i}" for r in range(3) for i in range(24))
    assert [(near, *rest) for near, _, *rest in outcomes] == [(2, [], 0)] * 3


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_worker_that_is_stopped_inside_a_step_holds_nothing(asked):
    class Made:
        pass

    alive = weakref.WeakSet()
    entered, stop = threading.Event(), threading.Event()  # inside the third call, and out of it

    def make():
        if len(alive) == 2:
            entered.set()
            stop.wait(60)
            raise Aborted("closed")
        alive.add(made := Made())
        return made

    gc.disable()
    try:
        prefetcher = Prefetcher(make, depth=3, name="test")
        assert entered.wait(60)
        for _ in range(asked):
            prefetcher.get()
            prefetcher.used()
        stop.set()
        assert prefetcher.close(60)
        assert not alive
    finally:
        gc.enable()


def test_what_nobody_closes_goes_when_it_is_dropped():
    def fn(rank, num_ranks):
        transport = opened(rank, num_ranks)
        held = len(left())
        transport.gather(np.zeros(1, np.uint8))
        del transport
        with pytest.raises(ConnectionError):
            node.meet(lambda _: (_ for _ in ()).throw(ConnectionError("a rank is gone")), rank, num_ranks)
        return held > 0, left()

    assert run_ranks(fn, 2, backend="gloo") == [(True, [])] * 2


def test_shared_memory_can_be_switched_off():
    def fn(rank, num_ranks):
        with open_scheduler(mixed_source(rank, 6), adapter=VISION, transport="network") as scheduler:
            return len(scheduler._channel.blocks.near), len(list(scheduler)) > 0

    assert run_ranks(fn, 2, backend="gloo") == [(0, True)] * 2


def test_a_sender_that_waits_for_room_can_be_aborted():
    def fn(rank, num_ranks):
        transport = opened(rank, num_ranks)
        kept = exchanged(transport, [[64, 64]] * 2)
        if rank == 0:
            transport._node.has_room = lambda: False
            transport.abort()
            with pytest.raises(Aborted):
                transport.alloc_send_buffers([64, 64])
        return len(kept)

    assert run_ranks(fn, 2, backend="gloo") == [2, 2]


def next_descriptor():
    os.close(number := os.dup(0))
    return number


def mapped_bytes():
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])


@pytest.mark.parametrize(
    ("limit", "used", "text"),
    [
        (resource.RLIMIT_NOFILE, next_descriptor, "Too many open files"),
        (resource.RLIMIT_AS, mapped_bytes, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("act", ["take", "read"])
def test_limits_of_a_process_are_named(limit, used, text, act):
    def fn(rank, num_ranks):
        arena = Arena(1)
        peer = PeerArena(os.getpid(), arena.fd, arena.token, 1)
        arena.take(0, 1 << 20)
        resource.setrlimit(limit, (used(), resource.getrlimit(limit)[1]))
        with pytest.raises(MemoryError, match=f"^no [0-9]+ bytes of shared memory: {text}$"):
            arena.take(1, 1 << 20) if act == "take" else peer.read(0, 0, 1 << 20)
        return True

    assert run_ranks(fn, 1, backend="gloo") == [True]


def test_memory_that_the_kernel_does_not_give_is_an_error_here_and_a_name_there(monkeypatch):
    """Without the check, writing to the memory would kill the process."""
    from evenpack.core import EvenpackError

    original = os.posix_fallocate

    def fn(rank, num_ranks):
        def refusing(fd, start, size):
            if rank == 1 and start and size > 4096:
                raise OSError(28, "No space left on device")
            original(fd, start, size)

        monkeypatch.setattr(os, "posix_fallocate", refusing)
        with open_scheduler(mixed_source(rank, 24), adapter=VISION, movement="free", timeout=3600.0) as scheduler:
            try:
                return [names_of(step) for step in scheduler], ""
            except (MemoryError, EvenpackError) as error:
                return type(error).__name__, str(error)

    outcomes = run_ranks(fn, 2, backend="gloo")
    assert outcomes[1][0] == "MemoryError" and "bytes of shared memory: No space left" in outcomes[1][1]
    assert outcomes[0][0] in ("PeerFailedError", "PeerLostError") and "rank 1" in outcomes[0][1], outcomes[0]
