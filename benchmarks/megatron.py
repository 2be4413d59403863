"""A step of `wrap_data_iterator` beside the documented algorithm of `dp_balanced` with one collective per field, in one run.

    python -m benchmarks.megatron [--ranks 4 8] [--samples 64] [--rounds 9] [--train-ms 300] [--json FILE]

Both bring samples of six fields, gather lengths, pack by next fit, move samples, and build the packs: the same packs. With
"minimal", the planner moves only what balance needs. "Ahead" is `prefetch=1`: samples are checked, planned and moved during
the step before, a pause of `--train-ms` here, in which a GPU would train. "At once" is `prefetch=0`: one call does all that.

Two times are taken of each. "call" is how long `wrap_data_iterator` takes: what the training loop waits for, as every pack is
built when its micro-batch is due, while the device runs the one before. "packs" adds the time to build all of them at once,
as `dp_balanced` does inside its call.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.rerun_state_machine  # noqa: F401  (once, before the ranks are forked)
import numpy as np
import torch
import torch.distributed as dist

from evenpack.integrations.megatron import next_fit_planner, wrap_data_iterator
from evenpack.scheduler import SchedulerConfig, plan_step
from evenpack.scheduler.testing import run_ranks

CAPACITY = 16384
KEYS = ("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len")
#: Of the call with steps prepared ahead, against one collective per field.
TARGETS: dict[str, dict[int, float]] = {
    "next fit, ahead": {4: 1.5, 8: 1.8},
    "minimal, ahead": {4: 3.0, 8: 3.0},
    "next fit, at once": {},
    "minimal, at once": {},
}
Packs = list[dict[str, torch.Tensor]]


def batch(rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of 200 to 8,000 tokens under Megatron-Core's keys."""
    rng = random.Random(rank)
    found = []
    for _ in range(count):
        length = rng.randrange(200, 8000)
        tokens = torch.randint(1, 30000, (length,))
        size = torch.tensor([length], dtype=torch.int32)
        row = (tokens, tokens.clone(), torch.ones(length), torch.arange(length), size, size.clone())
        found.append(dict(zip(KEYS, row, strict=True)))
    return found


def per_field(samples: list[dict[str, torch.Tensor]], rank: int, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """Pack by next fit and move every field with a collective of its own."""
    lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
    everyone = torch.empty(num_ranks * len(samples), dtype=torch.int64)
    dist.all_gather_into_tensor(everyone, lengths)
    sizes = everyone.tolist()
    packs = next_fit(sizes, num_ranks)
    target = {row: index % num_ranks for index, pack in enumerate(packs) for row in pack}
    first = rank * len(samples)
    sent = [[row for row in range(first, first + len(samples)) if target[row] == other] for other in range(num_ranks)]
    got = [[row for row in range(o * len(samples), (o + 1) * len(samples)) if target[row] == rank] for o in range(num_ranks)]
    received: dict[int, dict[str, torch.Tensor]] = {row: {} for rows in got for row in rows}
    for key in KEYS:
        widths = [1] * len(sizes) if key.endswith("len") else sizes
        outgoing = torch.cat([samples[row - first][key] for rows in sent for row in rows])
        incoming = torch.empty(sum(widths[row] for rows in got for row in rows), dtype=outgoing.dtype)
        split = [[sum(widths[row] for row in rows) for rows in side] for side in (got, sent)]
        dist.all_to_all_single(incoming, outgoing, *split)
        rows = [row for rows in got for row in rows]
        for row, part in zip(rows, incoming.split([widths[row] for row in rows]), strict=True):
            received[row][key] = part
    return [concatenated([received[row] for row in pack]) for pack in packs[rank::num_ranks]]


def next_fit(sizes: list[int], multiple: int) -> list[list[int]]:
    """Return the packs of all ranks, in order."""
    packs, room = [[]], CAPACITY
    for row, size in enumerate(sizes):
        if size > room:
            packs.append([])
            room = CAPACITY
        packs[-1].append(row)
        room -= size
    last = len(packs) - 1
    while len(packs) % multiple:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
        else:
            last -= 1
    return packs


def concatenated(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a pack with everything that `dp_balanced` puts into one."""
    pack = {key: torch.cat([sample[key] for sample in samples]) for key in KEYS[:4]}
    for key, name in (("original_seq_len", "cu_seqlens"), ("padded_seq_len", "cu_seqlens_padded")):
        lengths = torch.cat([sample[key] for sample in samples])
        pack[name] = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    pack["max_seqlen"] = lengths.max()
    return pack


def job(rank: int, num_ranks: int, count: int, rounds: int, pause: float) -> dict[str, list[tuple[float, float]]]:
    """Time every way on one rank, in turn, so that all see the same machine: milliseconds of the call, and with all packs."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    samples = batch(rank, count)
    config = SimpleNamespace(calculate_per_token_loss=True, max_seqlen_per_dp_cp_rank=CAPACITY)

    def wrapped(planner: Any, movement: str, ahead: int) -> Callable[[], Callable[[], Packs]]:
        settings = SchedulerConfig(max_tokens=CAPACITY, samples_per_step=1, prefetch=ahead, movement=movement)
        iterator = (sample for _ in range(rounds + 4) for sample in samples)

        def call() -> Callable[[], Packs]:
            packs, number, _, _ = wrap_data_iterator(iterator, config, count, settings=settings, planner=planner)
            return lambda: [next(packs) for _ in range(number)]

        return call

    def field_by_field() -> Callable[[], Packs]:
        packs = per_field(samples, rank, num_ranks)
        return lambda: packs

    ways: dict[str, Callable[[], Callable[[], Packs]]] = {
        "per field": field_by_field,
        "next fit, ahead": wrapped(next_fit_planner, "free", 1),
        "minimal, ahead": wrapped(plan_step, "minimal", 1),
        "next fit, at once": wrapped(next_fit_planner, "free", 0),
        "minimal, at once": wrapped(plan_step, "minimal", 0),
    }
    check_equal(ways["per field"]()(), ways["next fit, at once"]()())
    for way in ways.values():
        way()()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            time.sleep(pause)
            dist.barrier()
            start = time.perf_counter()
            build = way()
            called = time.perf_counter()
            build()
            times[name].append((1e3 * (called - start), 1e3 * (time.perf_counter() - start)))
            del build  # to free its packs is no part of the next way's time
    return times


def check_equal(expected: list[dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]) -> None:
    """Raise unless both ways made the same packs."""
    for one, other in zip(expected, found, strict=True):
        for key, value in one.items():
            assert torch.equal(value, other[key]), key


def main() -> None:
    """Time every way for every number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--samples", type=int, default=64, help="samples a rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--train-ms", type=float, default=300.0, help="pause between steps")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for num_ranks in given.ranks:
        runs = run_ranks(
            lambda rank, size: job(rank, size, given.samples, given.rounds, given.train_ms / 1e3),
            num_ranks,
            backend="gloo",
            timeout=300,
        )
        # A step is over when its slowest rank is done.
        slowest = {name: np.max([run[name] for run in runs], axis=0) for name in runs[0]}
        median = {name: np.median(values, axis=0).tolist() for name, values in slowest.items()}
        theirs = median["per field"][1]
        for name, targets in TARGETS.items():
            for what, ours in zip(("call", "packs"), median[name], strict=True):
                ratio = theirs / ours
                rows.append({"ranks": num_ranks, "way": name, "time": what, "ms": ours, "per_field_ms": theirs, "ratio": ratio})
                print(
                    f"{num_ranks} ranks  {name:17} {what:5} {ours:7.1f} ms  per field {theirs:7.1f} ms  {ratio:.2f} x"
                    + (f"  (target {targets[num_ranks]:g} x)" if what == "call" and num_ranks in targets else "")
                )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
