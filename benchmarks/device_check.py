"""What a machine without a GPU cannot show: NCCL, pinned staging, stream order, attention and Transformer Engine parity.

    torchrun --nproc-per-node N benchmarks/device_check.py      # one rank per GPU
    python benchmarks/device_check.py --cpu                     # what runs without a GPU, over gloo, on two processes

Prints one line per check and exits with 1 if one of them fails.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.exchange import picture_samples
from evenpack.collate import cp_slots, pack_samples
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.comm.channel import open_channel
from evenpack.scheduler.comm.transports import DeviceTransport, fixed_peers, open_nccl
from evenpack.scheduler.testing import run_ranks

ADAPTER = adapter_for("qwen2_5_vl")
#: A check returns whether it passed (None: does not apply here) and a line that says what was seen.
Outcome = tuple[bool | None, str]


def device_of(cpu: bool) -> torch.device:
    """Return this rank's device."""
    return torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())


def check_transports(device: torch.device) -> Outcome:
    """The device transport must move the same bytes as gloo."""
    if dist.get_world_size() == 1:
        return None, "needs two ranks"
    results, seconds = {}, {}
    for transport in ("host", "device"):
        config = SchedulerConfig(max_tokens=8, samples_per_step=1, transport=transport, timeout=60.0)
        channel = open_channel(ProcessGroups.from_world(), config, max_peers=1024)
        rank, size = channel.steps.rank, channel.steps.num_ranks
        near = {(rank + 1) % size, (rank - 1) % size} - {rank}
        sends = [4_000_000 + 16 * peer if peer in near else 0 for peer in range(size)]
        receives = [4_000_000 + 16 * rank if peer in near else 0 for peer in range(size)]
        data = np.random.default_rng(rank).integers(0, 256, sum(sends), np.uint8)
        outgoing = torch.from_numpy(data).split(sends)
        for _ in range(3):
            start = time.perf_counter()
            rows = channel.steps.gather(np.full(4096, rank, np.uint8))
            got = torch.cat(channel.blocks.exchange(outgoing, receives))
            seconds[transport] = time.perf_counter() - start
        results[transport] = rows.tobytes() + got.cpu().numpy().tobytes()
        channel.close()
    same = results["host"] == results["device"]
    return same, ", ".join(f"{name} {spent * 1e3:.1f} ms" for name, spent in seconds.items())


def packs_of(transport: str, prefetch: int) -> list[Any]:
    """Return the packs of a few steps, with a collective of the training loop between them."""
    source = picture_samples(dist.get_rank(), 24)
    config = SchedulerConfig(
        max_tokens=2048, samples_per_step=8, transport=transport, prefetch=prefetch, movement="free", timeout=120.0
    )
    packs = []
    with PackingScheduler(source, config=config, adapter=ADAPTER, groups=ProcessGroups.from_world()) as scheduler:
        for step in scheduler:
            flag = torch.ones(1, device="cuda" if "nccl" in str(dist.get_backend_config()) else "cpu")
            dist.all_reduce(flag)
            packs += [(batch.sample_ids, batch.input_ids, batch.pixel_values) for batch in step]
    return packs


def check_scheduler(device: torch.device) -> Outcome:
    """Every transport and depth of prefetch must hand out the same packs."""
    # Fixed peers change the plan, so "device" is compared with itself.
    host, auto = packs_of("host", 1), packs_of("auto", 2)
    ahead, synchronous = packs_of("device", 2), packs_of("device", 0)
    same = all(equal_packs(a, b) for a, b in ((host, auto), (ahead, synchronous)))
    return same, f"{len(host)} packs"


def equal_packs(first: list[Any], second: list[Any]) -> bool:
    """Return whether two lists of packs are equal bit for bit."""
    return len(first) == len(second) and all(
        a[0] == b[0]
        and torch.equal(a[1], b[1])
        and (a[2] is None) == (b[2] is None)
        and (a[2] is None or torch.equal(a[2], b[2]))
        for a, b in zip(first, second, strict=True)
    )


def check_pinning(device: torch.device) -> Outcome:
    """Packs must lie in pinned memory, and arrive whole although the copy runs beside the computation."""
    if device.type == "cpu":
        return None, "needs a GPU"
    batch = pack_samples(picture_samples(0, 8), adapter=ADAPTER, pin_memory=True)
    pinned = all(tensor.is_pinned() for tensor in (batch.input_ids, batch.pixel_values, batch.labels))
    moved = batch.to(device)
    same = torch.equal(moved.pixel_values.cpu(), batch.pixel_values) and torch.equal(moved.input_ids.cpu(), batch.input_ids)
    return pinned and same, f"pinned {pinned}, copies equal {same}"


def check_streams(device: torch.device) -> Outcome:
    """A gather on the side stream must not wait for the computation of the training stream."""
    if device.type == "cpu":
        return None, "needs a GPU"
    # Made directly, so that one GPU is enough.
    rank, size = dist.get_rank(), dist.get_world_size()
    group = open_nccl(dist.distributed_c10d._get_default_store(), "device-check-streams", rank, size, 60.0)
    transport = DeviceTransport(group, device=device, peers=fixed_peers(size, 8), timeout=60.0)
    transport.gather(np.zeros(64, np.uint8))
    matrix = torch.randn(8192, 8192, device=device)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(40):
        torch.mm(matrix, matrix)
    end.record()
    start = time.perf_counter()
    transport.gather(np.zeros(64, np.uint8))
    waited = time.perf_counter() - start
    still_busy = not end.query()
    torch.cuda.synchronize()
    transport.close()
    return still_busy, f"gather {waited * 1e3:.1f} ms inside {begin.elapsed_time(end):.0f} ms of computation"


def check_attention(device: torch.device) -> Outcome:
    """Packed logits must equal those of every sample alone."""
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=152064, rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        ),
        vision_config=dict(
            hidden_size=32, out_hidden_size=64, intermediate_size=48, depth=2, num_heads=2, fullatt_block_indexes=[1],
            window_size=112, tokens_per_second=2,
        ),
        image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = prepare_model(transformers.Qwen2_5_VLForConditionalGeneration(config).to(device, dtype)).eval()
    samples = picture_samples(0, 4)
    with torch.no_grad():
        batch = pack_samples(samples, adapter=ADAPTER, align=8).to(device)
        together = batch.unpack(model(**batch.forward_kwargs(model)).logits)
        alone = [pack_samples([sample], adapter=ADAPTER).to(device) for sample in samples]
        each = [model(**one.forward_kwargs(model)).logits[0] for one in alone]
    worst = max((a.float() - b.float()).abs().max().item() for a, b in zip(together, each, strict=True))
    limit = 1e-5 if dtype == torch.float32 else 0.05
    return worst <= limit, f"{model.config._attn_implementation}, {dtype}: largest difference {worst:.1e}"


def check_transformer_engine(device: torch.device) -> Outcome:
    """Context-parallel slots must be those of Transformer Engine."""
    try:
        import transformer_engine_torch as tex
    except (ImportError, OSError):
        return None, "Transformer Engine is not installed"
    rng = np.random.default_rng(0)
    for cp_size in (2, 4, 8):
        lengths = 2 * cp_size * rng.integers(1, 50, 20)
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        padded = torch.tensor(boundaries, dtype=torch.int32, device=device)
        for rank in range(cp_size):
            theirs = tex.thd_get_partitioned_indices(padded, int(boundaries[-1]), cp_size, rank).cpu().numpy()
            if not np.array_equal(theirs, cp_slots(boundaries, rank, cp_size)):
                return False, f"differs at cp {cp_size}, rank {rank}"
    return True, "cp 2, 4, 8: equal"


CHECKS: dict[str, Callable[[torch.device], Outcome]] = {
    "device transport against gloo": check_transports,
    "packs over every transport": check_scheduler,
    "pinned staging": check_pinning,
    "gather beside computation": check_streams,
    "packed attention against alone": check_attention,
    "Transformer Engine's slots": check_transformer_engine,
}


def run_checks(cpu: bool) -> list[tuple[str, bool | None, str]]:
    """Run every check on this rank."""
    torch.set_num_threads(1)
    outcomes = []
    for name, check in CHECKS.items():
        try:
            passed, text = check(device_of(cpu))
        except Exception as error:  # one broken check must not hide the others
            passed, text = False, f"{type(error).__name__}: {error}"
        outcomes.append((name, passed, text))
    return outcomes


def report(outcomes: list[list[tuple[str, bool | None, str]]]) -> int:
    """Print the worst outcome of all ranks for each check; return the exit code."""
    failed = False
    for index, (name, _, _) in enumerate(outcomes[0]):
        each = [rank[index] for rank in outcomes]
        _, passed, text = next((entry for entry in each if entry[1] is False), each[0])
        failed |= passed is False
        word = {True: "pass", False: "FAIL", None: "not run"}[passed]
        print(f"{word:<8} {name:<32} {text}")
    return int(failed)


def main() -> int:
    """Run the checks on every rank and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="run what needs no GPU, on two processes")
    if parser.parse_args().cpu:
        return report(run_ranks(lambda rank, num_ranks: run_checks(True), 2, backend="gloo", timeout=300))
    if not torch.cuda.is_available():
        print("no GPU here: --cpu runs what needs none", file=sys.stderr)
        return 2
    import os

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, run_checks(False))
    code = report(outcomes) if dist.get_rank() == 0 else 0
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
