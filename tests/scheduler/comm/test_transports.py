"""Transports move the same bytes; the device transport keeps to fixed peers."""

import itertools
import re
import threading
from functools import partial, partialmethod

import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenpack.scheduler import scheduler as scheduler_module
from evenpack.scheduler.comm.channel import open_channel
from evenpack.scheduler.comm.groups import ProcessGroups
from evenpack.scheduler.comm.liveness import Heartbeat
from evenpack.scheduler.comm.transports import Aborted, DeviceTransport, MemoryHub, TransportError, fixed_peers
from evenpack.scheduler.comm.transports.buffers import BufferPool
from evenpack.scheduler.comm.transports.threads import MemoryTransport
from evenpack.scheduler.config import SchedulerConfig
from evenpack.scheduler.prefetch import MainThreadExecutor
from evenpack.scheduler.stages.describe import record_dtype
from evenpack.scheduler.testing import run_ranks

from ..helpers import VISION, flat, image_sample, mixed_source, names_of, open_scheduler


@pytest.mark.parametrize("size", [0, 1, 4096, 2_000_001])
def test_rows_of_any_size_are_gathered(size):
    def fn(rank, num_ranks):
        channel = open_channel(ProcessGroups.from_world(), SchedulerConfig(max_tokens=8, samples_per_step=1, timeout=20.0))
        mine = [np.random.default_rng(peer).integers(0, 256, size, np.uint8) for peer in range(num_ranks)]
        rows = channel.steps.gather(mine[rank])
        channel.close()
        return np.array_equal(rows, np.stack(mine))

    assert run_ranks(fn, 3, backend="gloo") == [True] * 3


@pytest.mark.parametrize("transport", ["host", "device"])
def test_bytes_arrive_in_order_of_rank(transport):
    def fn(rank, num_ranks):
        config = SchedulerConfig(max_tokens=8, samples_per_step=1, transport=transport, timeout=20.0)
        channel = open_channel(ProcessGroups.from_world(), config)
        rows = channel.steps.gather(np.full(3, rank, np.uint8))
        sends = [(rank + 2 * peer) % 5 for peer in range(num_ranks)]
        receives = [(peer + 2 * rank) % 5 for peer in range(num_ranks)]
        parts = [torch.full((size,), 16 * rank + peer, dtype=torch.uint8) for peer, size in enumerate(sends)]
        incoming = torch.cat(channel.blocks.exchange(parts, receives))
        channel.close()
        expected = [16 * peer + rank for peer, size in enumerate(receives) for _ in range(size)]
        return rows[:, 0].tolist(), incoming.tolist() == expected

    assert run_ranks(fn, 4, backend="gloo") == [([0, 1, 2, 3], True)] * 4


@pytest.mark.parametrize(("num_ranks", "max_peers"), [(2, 8), (5, 2), (8, 8), (64, 8), (1024, 8), (7, 1), (9, 3)])
def test_fixed_peers_are_few_and_mutual(num_ranks, max_peers):
    peers = fixed_peers(num_ranks, max_peers)
    assert all(len(others) <= max_peers and rank not in others for rank, others in enumerate(peers))
    assert all(rank in peers[other] for rank, others in enumerate(peers) for other in others)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_device_transport_trains_every_sample_once(prefetch, monkeypatch):
    """The worker leaves its collectives to the training thread, which runs them in one order on every rank."""
    monkeypatch.setattr(scheduler_module, "open_channel", partial(open_channel, max_peers=2))

    def fn(rank, num_ranks):
        threads, partners, names = set(), set(), []

        def noted(transport, *args, original):
            threads.add(threading.current_thread().name)
            partners.update(transport.partners)
            return original(transport, *args)

        source = mixed_source(rank, 30)
        with open_scheduler(source, adapter=VISION, transport="device", prefetch=prefetch) as scheduler:
            for name in ("gather", "exchange"):
                monkeypatch.setattr(DeviceTransport, name, partialmethod(noted, original=getattr(DeviceTransport, name)))
            for step in scheduler:
                # A collective of the training loop between two steps: it must not meet one of ours.
                dist.all_reduce(torch.ones(1))
                names.append(names_of(step))
            return names, sorted(threads), len(partners)

    outcomes = run_ranks(fn, 4, backend="gloo")
    assert sorted(flat([names for names, _, _ in outcomes])) == sorted(f"{r}-{i}" for r in range(4) for i in range(30))
    assert all(threads == ["MainThread"] and 1 <= partners <= 2 for _, threads, partners in outcomes)


def test_partners_stay_few_over_a_thousand_steps():
    from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_step

    peers, rng = fixed_peers(16, 4), np.random.default_rng(0)
    pairs = set()
    for _ in range(1000):
        table = SampleTable.from_lengths(rng.integers(1, 100, 64), home=np.repeat(np.arange(16), 4))
        plan = plan_step(table, num_ranks=16, config=PlanConfig(max_tokens=400), peers=peers)
        moved = plan.rank != table.home
        pairs |= set(zip(table.home[moved].tolist(), plan.rank[moved].tolist(), strict=True))
    partners = [{b for a, b in pairs if a == rank} | {a for a, b in pairs if b == rank} for rank in range(16)]
    assert max(len(others) for others in partners) <= 4


def test_what_waits_in_a_hub_can_be_aborted():
    waiting, reads = threading.Event(), itertools.count()

    class Watched(MemoryTransport):
        def __getattribute__(self, name):
            if name == "aborted" and next(reads) == 1:  # the hub asks, and holds its lock until it waits
                waiting.set()
            return super().__getattribute__(name)

    transport = Watched(MemoryHub(2, timeout=3600.0), 0)  # a test that waits for it fails by its own limit
    other = threading.Thread(target=lambda: waiting.wait(60) and transport.abort())
    other.start()
    with pytest.raises(Aborted):
        transport.gather(np.zeros(1, np.uint8))
    other.join()
    with pytest.raises(Aborted):
        transport.gather(np.zeros(1, np.uint8))


def test_a_hub_names_who_did_not_come():
    with pytest.raises(TransportError, match=r"missing ranks \[1, 2\]"):
        MemoryHub(3, timeout=0.1).transport(0).gather(np.zeros(1, np.uint8))


def test_operations_of_the_worker_run_on_the_training_thread():
    executor, seen = MainThreadExecutor(), []

    def worker():
        seen.append(executor.run(lambda: threading.current_thread().name, is_gather=True))
        with pytest.raises(KeyError):
            executor.run(lambda: {}["missing"], is_gather=True)
        with pytest.raises(Aborted):
            executor.run(lambda: None, is_gather=True)

    thread = threading.Thread(target=worker)
    thread.start()
    executor.serve(lambda: executor.num_gathers == 1)
    executor.serve(lambda: executor.num_gathers == 2)
    executor.close()
    thread.join(60)
    assert seen == ["MainThread"] and not thread.is_alive()


def test_buffers_are_used_again_only_when_nothing_looks_into_them():
    pool = BufferPool()
    first = pool.take(100)
    address = first.ctypes.data
    assert pool.take(100).ctypes.data != address
    view = torch.from_numpy(first[16:64]).view(torch.bfloat16)
    del first
    assert pool.take(50).ctypes.data != address
    del view
    assert pool.take(50).ctypes.data == address


def test_only_moved_samples_travel():
    """Bytes on the wire: the blocks that the plan moves, and under 1 % for rows and headers."""

    def fn(rank, num_ranks):
        counted = {"rows": 0, "blocks": 0, "moved": 0}
        source = [image_sample([(1, 16, 16)], f"{rank}-{index}", text=5 + 40 * rank, seed=index) for index in range(8)]
        with open_scheduler(source, adapter=VISION, movement="free", max_tokens=400, prefetch=0) as scheduler:
            steps, blocks = scheduler._channel.steps, scheduler._channel.blocks
            gather, exchange = steps.gather, blocks.exchange

            def counting_gather(data):
                counted["rows"] += data.size * (num_ranks - 1)
                return gather(data)

            def counting_exchange(parts, receive_sizes):
                assert parts[rank].numel() == 0
                counted["blocks"] += sum(part.numel() for part in parts)
                return exchange(parts, receive_sizes)

            steps.gather, blocks.exchange = counting_gather, counting_exchange
            for step in scheduler:
                counted["moved"] = counted["moved"] + step.plan.moved_bytes
        return counted

    outcomes = run_ranks(fn, 3)
    moved = outcomes[0]["moved"]
    assert sum(counted["blocks"] for counted in outcomes) == moved > 0
    assert sum(counted["rows"] for counted in outcomes) < 0.01 * moved


def test_a_row_takes_at_most_32_bytes():
    assert [record_dtype(phases).itemsize for phases in (1, 2, 3)] == [40, 48, 56]


def test_memory_of_the_exchange_is_bounded_and_reported():
    def fn(rank, num_ranks):
        source = [image_sample([(1, 16, 16)], f"{rank}-{index}", text=5 + 40 * rank, seed=index) for index in range(48)]
        held, sent = [], []
        with open_scheduler(source, adapter=VISION, movement="free", max_tokens=400) as scheduler:
            for step in scheduler:
                [batch.total_tokens for batch in step]
                held.append(scheduler.buffer_bytes)
                sent.append(step.plan.moved_bytes)
        return held, sent

    for held, sent in run_ranks(fn, 2, backend="gloo"):
        # One outgoing buffer and at most four received ones, with an eighth of room each.
        assert 0 < max(held) <= 5 * 9 / 8 * max(sent) + 4096


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([], "timed out waiting for a rank at step 3: no answer"),
        (
            [(1, "collecting step 3"), (2, "gathering step 3")],
            r"timed out at step 3 waiting for rank 1 \(last: collecting step 3\); all processes are alive",
        ),
        ([(1, "gathering step 3")], r"waiting for rank 1 \(last: gathering step 3\); all processes are alive"),
    ],
)
def test_ranks_that_are_late_but_alive_are_named(stages, text):
    class Alive(Heartbeat):
        missing = staticmethod(list)

        def stages(self):
            return stages

    heartbeat = Alive(None, name="", rank=0, num_ranks=3, interval=1.0, patience=1.0)
    heartbeat.stage = "gathering step 3"
    assert re.search(text, str(heartbeat.lost(TransportError("no answer"), "step 3")))
