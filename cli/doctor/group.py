"""What only the ranks of a group can tell together; every function here is collective."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ...collate import prepare_sample
from ...core import EvenpackError, FieldMismatchError, Sample
from ...models import adapter_for
from ...scheduler import SampleTable, StepPlan
from ...scheduler.comm.agreement import agree
from ...scheduler.comm.channel import Channel
from ...scheduler.comm.transports import HostTransport, Transport, gather_bytes
from ...scheduler.plan import PlanConfig, plan_fixed
from ...scheduler.stages.blocks import Block, read_block
from ...scheduler.stages.describe import Described
from ...scheduler.stages.exchange import Exchanger
from . import local
from .finding import Finding

#: Clocks that differ by more make logs of several machines useless.
_MOST_SKEW = 1.0
#: Bandwidth between ranks below which something slower than the network is in use, in bytes a second.
_LEAST_BANDWIDTH = 100e6
_ROUNDS = 5
#: Rows of a rank that a gather is timed with, and the bytes of each.
ROWS, ROW_BYTES = 64, 40


def check_agreement(transport: Transport) -> Finding:
    """Compare what must be the same on every rank, as a scheduler does before its first step."""
    try:
        agree(transport, local.must_agree())
    except FieldMismatchError as error:
        return Finding(
            name="agreement", level="wrong", text=str(error), fix="install the same version of evenpack on every machine"
        )
    libraries = [sorted(found.items()) for found in _all(transport, local.versions())]
    if any(found != libraries[0] for found in libraries):
        rank, other = next((rank, found) for rank, found in enumerate(libraries) if found != libraries[0])
        different = [f"{name} {now} not {was}" for (name, was), (_, now) in zip(libraries[0], other, strict=True) if was != now]
        return Finding(name="agreement", level="note", text=f"rank {rank} differs from rank 0: {', '.join(different)}")
    return Finding(name="agreement", text="versions of evenpack, planner and wire format are the same on every rank")


def is_fine_everywhere(transport: Transport, findings: list[Finding]) -> bool:
    """Return whether no rank found something wrong, so that all go on, or none does."""
    return all(_all(transport, all(finding.level != "wrong" for finding in findings)))


def check_wire(channel: Channel) -> Finding:
    """Send a sample to the next rank and back, as blocks: what returns must be what left."""
    transport, exchanger = channel.steps, Exchanger(channel.blocks)
    mine = _wire_sample(transport.rank)
    error = None
    returned = mine
    for places in (1, -1):
        try:
            returned = shift(exchanger, transport, returned, places)
        except EvenpackError as found:  # the others wait for this rank in the next exchange: it gives them its own
            error = error or found
    if error is not None:
        return Finding(name="wire", level="wrong", text=f"{type(error).__name__}: {error}", fix=_WIRE_FIX)
    broken = differences(mine, returned)
    after = (transport.rank + 1) % transport.num_ranks
    if returned.sample_id == _wire_name(after) != mine.sample_id:
        text = f"rank {after} could not read the sample that it got from here"
        return Finding(name="wire", level="wrong", text=text, fix=_WIRE_FIX)
    if broken:
        return Finding(name="wire", level="wrong", text=f"fields {broken} came back changed", fix=_WIRE_FIX)
    if transport.num_ranks == 1:
        return Finding(name="wire", text="a sample was written as a block and read as it was; there is nobody to send it to")
    near = len(channel.blocks.near) if isinstance(channel.blocks, HostTransport) else 0
    way = f"; {near} other ranks of this node share memory with this one" if near else ""
    return Finding(name="wire", text=f"its sample went to the next rank as a block, and came back as it left{way}")


_WIRE_FIX = "the network, or memory, changes data: try --transport host, and look at the machine's hardware logs"


def _wire_name(rank: int) -> str:
    """Return the name of a rank's sample."""
    return f"from rank {rank}"


def _wire_sample(rank: int) -> Sample:
    """Return a sample with text, an image, labels and a name, different on every rank."""
    rng, adapter = np.random.default_rng(rank), adapter_for("qwen2_5_vl")
    text = rng.integers(0, 30_000, int(rng.integers(5, 50))).tolist()
    anchors = [adapter.media_tokens["image"]] * 4
    raw = {
        "input_ids": torch.tensor([*text, adapter.vision_start, *anchors, adapter.vision_end]),
        "pixel_values": torch.from_numpy(rng.standard_normal((16, adapter.patch_dim), dtype=np.float32)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "sample_id": _wire_name(rank),
    }
    return prepare_sample(raw, adapter=adapter)


def shift(exchanger: Exchanger, transport: Transport, sample: Sample, places: int) -> Sample:
    """Give every rank's sample to the rank so many places on; return the one that came."""
    block = Block.of(sample)
    if transport.num_ranks == 1:
        data = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
        block.write(data.numpy(), data.data_ptr(), row=0, digest=0)
        returned = read_block(data, row=0, digest=0)
        assert isinstance(returned, Sample)
        return returned
    sizes = [size for [size] in _all(transport, [block.nbytes])]
    plan, table = _ring_plan(sizes, places)
    received = exchanger(table, plan, [Described(block, np.zeros(()))])
    [found] = received.values()
    assert isinstance(found, Sample)
    return found


def _ring_plan(nbytes: list[int], places: int) -> tuple[StepPlan, SampleTable]:
    """Return a plan that moves each rank's one sample so many ranks on."""
    ranks = len(nbytes)
    table = SampleTable.from_lengths([1] * ranks, home=np.arange(ranks), nbytes=nbytes)
    target = (np.arange(ranks) + places) % ranks
    config = PlanConfig(max_tokens=1, num_microbatches=1)
    return plan_fixed(table, target, np.zeros(ranks, np.int64), num_ranks=ranks, config=config), table


def differences(sent: Sample, returned: Sample) -> list[str]:
    """Return the names of the fields that differ."""
    names = [name for name in {*sent.values, *returned.values} if not _same(sent.values.get(name), returned.values.get(name))]
    return sorted(names) + (["sample_id"] if sent.sample_id != returned.sample_id else [])


def clock() -> float:
    """Return this machine's time, in seconds since 1970."""
    return time.time()


def check_clocks(transport: Transport) -> Finding:
    """Compare the clocks: each rank reads its own between two collectives, and the quickest two count.

    Nobody leaves the first before all have come to it, and nobody leaves the second before all have read their clocks: they
    were read within the time that the two took, on any rank's watch.
    """
    best, stamps = float("inf"), np.zeros(transport.num_ranks)
    empty = np.zeros(8, np.uint8)
    for _ in range(_ROUNDS):
        start = time.monotonic()
        transport.gather(empty)
        mine = np.array([clock()])
        everyone = transport.gather(mine.view(np.uint8)).copy().view(np.float64)[:, 0]
        seconds = time.monotonic() - start
        if seconds < best:
            best, stamps = seconds, everyone
    skew = float(stamps.max() - stamps.min())
    # What the first rank saw: the ranks say the same.
    skew, best = _all(transport, [skew, best])[0]
    stamps = np.array(_all(transport, stamps.tolist())[0])
    far = int(np.argmax(np.abs(stamps - np.median(stamps))))
    figures = {"skew_seconds": skew, "round_trip_seconds": best}
    if skew - best > _MOST_SKEW:
        text = f"clocks differ by {skew:.2f} s (rank {far} most), so logs of several machines cannot be put in order"
        return Finding(name="clocks", level="wrong", text=text, fix="synchronise them (chrony, ntpd)", figures=figures)
    return Finding(
        name="clocks", text=f"clocks differ by at most {max(skew, best) * 1e3:.3g} ms, as well as can be told", figures=figures
    )


def measure(channel: Channel, megabytes: float) -> list[Finding]:
    """Time the gather and the exchange of a scheduler, beside bare collectives of the same bytes."""
    transport = channel.steps
    if transport.num_ranks == 1:
        return [Finding(name="bandwidth", text="one rank: nothing is sent; start it under torchrun to measure")]
    return [_measure_gather(transport), _measure_exchange(channel, megabytes)]


def _measure_gather(transport: Transport) -> Finding:
    rows = np.zeros(ROWS * ROW_BYTES, np.uint8)
    device = _bare_device()
    out = torch.empty(transport.num_ranks * rows.size, dtype=torch.uint8, device=device)
    mine = torch.zeros(rows.size, dtype=torch.uint8, device=device)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
    ours, bare = _turns(transport, lambda: transport.gather(rows), lambda: _bare(lambda: all_gather(out, mine)))
    text = f"{ROWS} rows of every rank in {ours * 1e3:.3g} ms; a bare all-gather of {dist.get_backend()} {bare * 1e3:.3g} ms"
    return Finding(name="gather", text=text, figures={"seconds": ours, "bare_seconds": bare})


def _measure_exchange(channel: Channel, megabytes: float) -> Finding:
    transport, exchanger = channel.steps, Exchanger(channel.blocks)
    sample = _large_sample(megabytes)
    block, ranks, rank = Block.of(sample), transport.num_ranks, transport.rank
    plan, table = _ring_plan([block.nbytes] * ranks, 1)
    mine = [Described(block, np.zeros(()))]
    send, receive = [0] * ranks, [0] * ranks
    send[(rank + 1) % ranks] = receive[(rank - 1) % ranks] = block.nbytes
    device = _bare_device()
    outgoing, incoming = (torch.zeros(block.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    ours, bare = _turns(
        transport,
        lambda: exchanger(table, plan, mine),
        lambda: _bare(lambda: dist.all_to_all_single(incoming, outgoing, receive, send)),
    )
    rate, bare_rate = block.nbytes / ours, block.nbytes / bare
    text = (
        f"{rate / 1e6:,.0f} MB/s a rank, with checksums, in blocks of {block.nbytes / 1e6:.3g} MB; bare {dist.get_backend()} "
        f"{bare_rate / 1e6:,.0f} MB/s"
    )
    figures = {"bytes_per_second": rate, "bare_bytes_per_second": bare_rate, "bytes": block.nbytes}
    if rate < _LEAST_BANDWIDTH:
        fix = "gloo may be on a slow network: set GLOO_SOCKET_IFNAME to the fast one's interface"
        return Finding(name="exchange", level="note", text=text, fix=fix, figures=figures)
    return Finding(name="exchange", text=text, figures=figures)


def _large_sample(megabytes: float) -> Sample:
    adapter = adapter_for("qwen2_5_vl")
    side = max(2, 2 * round((megabytes * 1e6 / (4 * adapter.patch_dim)) ** 0.5 / 2))
    anchors = [adapter.media_tokens["image"]] * (side * side // 4)
    raw = {
        "input_ids": torch.tensor([adapter.vision_start, *anchors, adapter.vision_end]),
        "pixel_values": torch.ones(side * side, adapter.patch_dim),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }
    return prepare_sample(raw, adapter=adapter)


def _turns(transport: Transport, ours: Callable[[], Any], bare: Callable[[], Any]) -> tuple[float, float]:
    """Return the median seconds of two collectives, run in turn, on the slowest rank; the first round is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS + 1):
        for spent, call in zip(seconds, (ours, bare), strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    medians = _all(transport, [statistics.median(each[1:]) for each in seconds])
    return max(each[0] for each in medians), max(each[1] for each in medians)


def _bare(call: Callable[[], Any]) -> None:
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _bare_device() -> torch.device:
    if "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all(transport: Transport, value: Any) -> list[Any]:
    return [msgspec.json.decode(data) for data in gather_bytes(transport, msgspec.json.encode(value))]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)
