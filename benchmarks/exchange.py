"""Exchange of samples between gloo ranks, beside what others do with the same plan, in one run.

    python -m benchmarks.exchange [--ranks 4 8] [--rounds 15] [--json FILE]

Three questions:

1. How near is the exchange of blocks to a bare `all_to_all_single` of the same bytes?
2. How much faster is it than one collective per field, which is how Megatron-Core moves samples?
3. What do planned moves cost, where only the samples that balance needs are moved?

Ranks of one node share memory; what is left of it between nodes, the rows over the network say.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from evenpack.collate import prepare_sample
from evenpack.core import Field, Sample
from evenpack.models import adapter_for
from evenpack.scheduler import PlanConfig, ProcessGroups, SampleTable, SchedulerConfig, StepPlan, plan_step
from evenpack.scheduler.comm.channel import open_channel
from evenpack.scheduler.plan import plan_fixed
from evenpack.scheduler.stages.blocks import Block
from evenpack.scheduler.stages.describe import Described
from evenpack.scheduler.stages.exchange import Exchanger
from evenpack.scheduler.testing import run_ranks

FIELDS = ("input_ids", "labels", "position_ids", "loss_weights", "original_seq_len", "padded_seq_len")
ADAPTER = adapter_for("text")
ADAPTER = type(ADAPTER)(
    **{
        **{name: getattr(ADAPTER, name) for name in ADAPTER.__struct_fields__},
        "fields": ADAPTER.fields.extended(
            [
                Field(name="position_ids", kind="token", dtype="int64", default=0),
                Field(name="original_seq_len", kind="sample", dtype="int32", shape=(1,)),
                Field(name="padded_seq_len", kind="sample", dtype="int32", shape=(1,)),
            ]
        ),
    }
)
#: Target of each row of the table, by number of ranks.
TARGETS = {"all_to_all": {4: 0.8, 8: 0.8}, "per field": {4: 1.5, 8: 1.8}, "per field, minimal": {4: 3.0, 8: 3.0}}


def picture_samples(rank: int, count: int) -> list[Sample]:
    """Return image-text samples: 50 to 400 tokens of text and an image of 256 to 1,024 patches of 1,176 float32."""
    rng = np.random.default_rng(rank)
    adapter = adapter_for("qwen2_5_vl")
    samples = []
    for index in range(count):
        h, w = (2 * rng.integers(8, 17, 2)).tolist()
        text = rng.integers(0, 30000, int(rng.integers(50, 400))).tolist()
        ids = [*text, adapter.vision_start, *[adapter.media_tokens["image"]] * (h * w // 4), adapter.vision_end]
        raw = {
            "input_ids": torch.tensor(ids), "pixel_values": torch.from_numpy(rng.random((h * w, 1176), np.float32)),
            "image_grid_thw": torch.tensor([[1, h, w]]), "sample_id": f"{rank}-{index}",
        }  # fmt: skip
        samples.append(prepare_sample(raw, adapter=adapter))
    return samples


def make_samples(rank: int, count: int, longest: int) -> list[Sample]:
    """Return samples of 200 to `longest` tokens with the six fields that Megatron-Core's have."""
    rng = np.random.default_rng(rank)
    samples = []
    for index, length in enumerate(rng.integers(200, longest, count).tolist()):
        ids = torch.from_numpy(rng.integers(0, 30000, length))
        raw = {
            "input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(length),
            "loss_weights": torch.ones(length), "original_seq_len": torch.tensor([length], dtype=torch.int32),
            "padded_seq_len": torch.tensor([length], dtype=torch.int32), "sample_id": f"{rank}-{index}",
        }  # fmt: skip
        samples.append(prepare_sample(raw, adapter=ADAPTER))
    return samples


def table_of(all_samples: Sequence[Sequence[Sample]]) -> SampleTable:
    """Return the planner's table of all ranks' samples."""
    lengths = [sample.num_tokens for samples in all_samples for sample in samples]
    home = [rank for rank, samples in enumerate(all_samples) for _ in samples]
    nbytes = [Block.of(sample).nbytes for samples in all_samples for sample in samples]
    cost = [length + length * length // 65536 for length in lengths]
    return SampleTable.from_lengths(lengths, home=home, nbytes=nbytes, cost=cost)


def shuffle_plan(table: SampleTable, num_ranks: int) -> StepPlan:
    """Return a plan that moves almost everything: samples dealt out in turn."""
    rank = (np.arange(len(table)) * 7 + table.home) % num_ranks
    config = PlanConfig(max_tokens=10**9, num_microbatches=1)
    return plan_fixed(table, rank, np.zeros(len(table), np.int64), num_ranks=num_ranks, config=config)


def per_field(samples: Sequence[Sample], table: SampleTable, plan: StepPlan, rank: int, num_ranks: int) -> list[dict]:
    """Move samples with one all-to-all per field, staying ones included; return those of this rank."""
    mine = np.flatnonzero(table.home == rank)
    order = mine[np.argsort(plan.rank[mine], kind="stable")]
    first = int(mine[0])
    coming = np.flatnonzero(plan.rank == rank)
    coming = coming[np.argsort(table.home[coming], kind="stable")]
    out: list[dict] = [{} for _ in coming]
    for name in FIELDS:
        each = (lambda row: 1) if name.endswith("_len") else (lambda row: int(table.tokens[row]))
        send = torch.cat([samples[row - first].tensor(name) for row in order.tolist()])
        send_sizes, receive_sizes = [0] * num_ranks, [0] * num_ranks
        for row in order.tolist():
            send_sizes[plan.rank[row]] += each(row)
        sizes = [each(row) for row in coming.tolist()]
        for row, size in zip(coming.tolist(), sizes, strict=True):
            receive_sizes[table.home[row]] += size
        receive = torch.empty(sum(receive_sizes), dtype=send.dtype)
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes)
        for target, part in zip(out, receive.split(sizes), strict=True):
            target[name] = part
    return out


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together, until the last has what it returns."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    dist.barrier()
    seconds = time.perf_counter() - start
    del result  # what is freed here is no part of it
    return seconds


def measure(rank: int, num_ranks: int, count: int, longest: int, rounds: int) -> dict[str, list[float]]:
    """Run every contestant in turn; return seconds per round."""
    torch.set_num_threads(1)
    everyone = [make_samples(r, count, longest) for r in range(num_ranks)]
    samples, table = everyone[rank], table_of(everyone)
    described = [Described(Block.of(sample), np.zeros(())) for sample in samples]
    channels = [
        open_channel(ProcessGroups.from_world(), SchedulerConfig(max_tokens=8, samples_per_step=1, transport=transport))
        for transport in ("auto", "network")
    ]
    exchange, over_network = (Exchanger(channel.blocks) for channel in channels)
    full = shuffle_plan(table, num_ranks)
    minimal = plan_step(table, num_ranks=num_ranks, config=PlanConfig(max_tokens=32768))
    send, receive = moved_sizes(table, full, rank, num_ranks)
    buffers = torch.ones(sum(send), dtype=torch.uint8), torch.empty(sum(receive), dtype=torch.uint8)
    contestants: dict[str, Callable[[], object]] = {
        "bare all_to_all_single": lambda: dist.all_to_all_single(buffers[1], buffers[0], receive, send),
        "blocks, full shuffle": lambda: exchange(table, full, described),
        "one collective per field": lambda: per_field(samples, table, full, rank, num_ranks),
        "blocks, minimal movement": lambda: exchange(table, minimal, described),
        "blocks, full shuffle, network": lambda: over_network(table, full, described),
    }
    check_same(exchange(table, full, described), per_field(samples, table, full, rank, num_ranks), table, full, rank)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, call in contestants.items():
            spent = timed(call)
            if turn >= 2:
                seconds[name].append(spent)
    seconds |= measure_pictures(rank, num_ranks, count // 4, rounds, exchange, over_network)
    seconds["moved bytes, full / minimal"] = [float(full.moved_bytes), float(minimal.moved_bytes)]
    for channel in channels:
        channel.close()
    return seconds


def measure_pictures(
    rank: int, num_ranks: int, count: int, rounds: int, exchange: Exchanger, over_network: Exchanger
) -> dict[str, list[float]]:
    """Shuffle image-text samples as blocks and as bare bytes, in turn; return seconds per round."""
    samples = picture_samples(rank, count)
    sizes: list = [None] * num_ranks
    dist.all_gather_object(sizes, [(sample.num_tokens, Block.of(sample).nbytes) for sample in samples])
    lengths = [tokens for each in sizes for tokens, _ in each]
    home = [r for r, each in enumerate(sizes) for _ in each]
    table = SampleTable.from_lengths(lengths, home=home, nbytes=[size for each in sizes for _, size in each])
    plan = shuffle_plan(table, num_ranks)
    described = [Described(Block.of(sample), np.zeros(())) for sample in samples]
    send, receive = moved_sizes(table, plan, rank, num_ranks)
    buffers = torch.ones(sum(send), dtype=torch.uint8), torch.empty(sum(receive), dtype=torch.uint8)
    bare, blocks, network = [], [], []
    for _ in range(rounds + 2):
        bare.append(timed(lambda: dist.all_to_all_single(buffers[1], buffers[0], receive, send)))
        blocks.append(timed(lambda: exchange(table, plan, described)))
        network.append(timed(lambda: over_network(table, plan, described)))
    return {"bare, pictures": bare[2:], "blocks, pictures": blocks[2:], "blocks, pictures, network": network[2:]}


def moved_sizes(table: SampleTable, plan: StepPlan, rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the bytes that this rank sends to and receives from every other."""
    moves = plan.rank != table.home
    send = [int(table.nbytes[moves & (table.home == rank) & (plan.rank == peer)].sum()) for peer in range(num_ranks)]
    receive = [int(table.nbytes[moves & (plan.rank == rank) & (table.home == peer)].sum()) for peer in range(num_ranks)]
    return send, receive


def check_same(ours: dict[int, Sample], theirs: list[dict], table: SampleTable, plan: StepPlan, rank: int) -> None:
    """Raise unless both ways gave the same samples."""
    coming = np.flatnonzero(plan.rank == rank)
    coming = coming[np.argsort(table.home[coming], kind="stable")]
    for row, other in zip(coming.tolist(), theirs, strict=True):
        for name in FIELDS:
            assert torch.equal(ours[row].tensor(name), other[name]), (row, name)


def ratios(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """Return median, lowest and highest of the ratio, round by round."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return statistics.median(each), min(each), max(each)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--samples", type=int, default=64, help="samples per rank")
    parser.add_argument("--longest", type=int, default=8000, help="longest sample in tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {}
    print(f"{'ranks':>5}  {'what':<48} {'median':>8} {'range':>16}  target")
    for num_ranks in arguments.ranks:
        outcomes = run_ranks(
            lambda rank, size: measure(rank, size, arguments.samples, arguments.longest, arguments.rounds),
            num_ranks, backend="gloo", timeout=900,
        )  # fmt: skip
        seconds = outcomes[0]
        rows = {
            "all_to_all": ("bandwidth, of bare all_to_all_single, pictures", "bare, pictures", "blocks, pictures"),
            "all_to_all, text": ("the same, text of 6 small fields", "bare all_to_all_single", "blocks, full shuffle"),
            "all_to_all, network": ("the same, pictures, network alone", "bare, pictures", "blocks, pictures, network"),
            "per field": ("times faster than one collective per field", "one collective per field", "blocks, full shuffle"),
            "per field, network": (
                "the same, network alone", "one collective per field", "blocks, full shuffle, network",
            ),
            "per field, minimal": ("the same, minimal movement", "one collective per field", "blocks, minimal movement"),
        }  # fmt: skip
        for key, (text, slow, fast) in rows.items():
            median, low, high = ratios(seconds[slow], seconds[fast])
            target = TARGETS.get(key, {}).get(num_ranks)
            verdict = "" if target is None else f">= {target}  {'pass' if median >= target else 'MISS'}"
            print(f"{num_ranks:>5}  {text:<48} {median:8.2f} {f'{low:.2f} to {high:.2f}':>16}  {verdict}")
            report[f"{num_ranks} {key}"] = {"median": median, "low": low, "high": high, "target": target}
        full, minimal = seconds["moved bytes, full / minimal"]
        print(f"{num_ranks:>5}  {'bytes moved: full shuffle, minimal (MB)':<48} {full / 1e6:8.1f} {minimal / 1e6:16.1f}")
        for name, spent in seconds.items():
            if name.startswith("moved"):
                continue
            text = f"{min(spent) * 1e3:.1f} to {max(spent) * 1e3:.1f}"
            print(f"{num_ranks:>5}  {name + ' (ms)':<48} {statistics.median(spent) * 1e3:8.1f} {text:>16}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
