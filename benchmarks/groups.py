"""Groups whose prefix is computed once: the work that is left and how evenly it is spread, and real training on two ranks.

    python -m benchmarks.groups             # 64 simulated ranks, then two real ones, in about four minutes
    python -m benchmarks.groups --quick     # fewer steps, in two minutes

Simulated: the work of a step after groups were folded (copies of prefixes in parts counted) over that of the fewest parts that
fit into packs, the largest over the mean load, and the step's time over the ideal without sharing. Costs are those of a decoder
of 7 billion parameters. Real: a tiny Qwen2.5-VL, 8 answers to a picture, both ranks pinned to a core, trained through
groups="prompt", through groups="split", and the padded way (batches of 8, a picture for every answer), in turn.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenpack.collate import fold_group, prepare_sample
from evenpack.collate.samples.group import parts_of
from evenpack.core import Sample, SampleGroup
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import (
    CostModel,
    PackingScheduler,
    PlanConfig,
    ProcessGroups,
    SampleTable,
    SchedulerConfig,
    plan_step,
)
from evenpack.scheduler.cost.model import default_cost
from evenpack.scheduler.testing import run_ranks

NUM_RANKS, GROUPS_PER_RANK, CAPACITY = 64, 4, 32768
#: Name: answers to a prompt, median and spread (of the logarithm) of their lengths.
ROWS = {
    "8 short answers": (8, 150, 0.6),
    "8 chains of thought": (8, 1500, 0.8),
    "16 short answers": (16, 150, 0.6),
    "16 chains of thought": (16, 1500, 0.8),
}
#: A prompt with a picture or two.
PROMPT, PROMPT_SPREAD = 1200, 0.5
ADAPTER = adapter_for("text")


def members(rng: np.random.Generator, count: int, median: int, spread: float, home: int) -> list[Sample]:
    """Return the answers to one prompt."""
    prompt = rng.integers(0, 1000, int(np.clip(rng.lognormal(np.log(PROMPT), PROMPT_SPREAD), 64, 6000)))
    lengths = rng.lognormal(np.log(median), spread, count).clip(8, 8000).astype(int)
    found = []
    for number, length in enumerate(lengths.tolist()):
        ids = torch.from_numpy(np.concatenate([prompt, [1000 + number], rng.integers(0, 1000, length)]))
        labels = torch.where(torch.arange(len(ids)) < len(prompt), -100, ids)
        found.append(prepare_sample({"input_ids": ids, "labels": labels, "group_id": home}, adapter=ADAPTER))
    return found


def has_room(part: SampleGroup) -> bool:
    """Whether a part fits into a pack."""
    return part.num_tokens <= CAPACITY


def cost_of(unit: SampleGroup, cost: CostModel) -> int:
    """Return the decoder's work of a group: its members alone, their prefix once."""
    alone = sum(sum(cost.sample_cost(member.num_tokens)) for member in unit.members)
    return alone - (len(unit.members) - 1) * sum(cost.sample_cost(unit.prefix)) if unit.prefix else alone


def simulated(name: str, sync: str, steps: int) -> list[bool]:
    """Print one line; return its verdicts. The first step has no mean load of a step before, and is not counted."""
    count, median, spread = ROWS[name]
    rng, cost, heavy = np.random.default_rng(0), default_cost(ADAPTER), None
    works, spreads, times, folding = [], [], [], []
    for step in range(steps + 1):
        homes = np.repeat(np.arange(NUM_RANKS), GROUPS_PER_RANK).tolist()
        groups = [members(rng, count, median, spread, home) for home in homes]
        fewest = [parts_of(group, ADAPTER, groups="prompt", fits=has_room) for group in groups]
        once = sum(cost_of(part, cost) for found in fewest for part in found)
        split = sum(sum(cost.sample_cost(member.num_tokens)) for group in groups for member in group)

        def is_heavy(part: SampleGroup, most: int | None = heavy) -> bool:
            return most is not None and cost_of(part, cost) > most

        started = time.thread_time()
        for group in groups:
            fold_group(group, ADAPTER)
        folding.append((time.thread_time() - started) / len(groups))
        parts = [parts_of(group, ADAPTER, groups="prompt", fits=has_room, is_heavy=is_heavy) for group in groups]
        units = [(part, home) for found, home in zip(parts, homes, strict=True) for part in found]
        costs = np.array([cost_of(unit, cost) for unit, _ in units], np.int64)
        tokens = np.array([unit.num_tokens for unit, _ in units], np.int64)
        table = SampleTable.from_lengths(tokens, home=np.array([home for _, home in units]), cost=costs[:, None])
        config = PlanConfig(max_tokens=CAPACITY, sync=sync, movement="free")  # type: ignore[arg-type]
        plan = plan_step(table, num_ranks=NUM_RANKS, config=config)
        heavy = int(costs.sum()) // (NUM_RANKS * (2 if sync == "step" else 4))
        if step:
            works.append(costs.sum() / once)
            spreads.append(float(plan.imbalance))
            times.append(plan.value * NUM_RANKS / split)
    work, worst, share = statistics.mean(works), statistics.mean(spreads), statistics.mean(times)
    single = share < 1 and worst <= (1.05 if sync == "step" else 1.10)
    verdicts = [work <= 1.02, single, statistics.median(folding) <= 1e-3]
    marks = " ".join("pass" if good else "MISS" for good in verdicts)
    print(
        f"{name:21s} {sync:10s} work {work:6.4f}  imbalance {worst:6.4f}  time over ideal without sharing {share:6.4f}  "
        f"folding {1e3 * statistics.median(folding):5.2f} ms a group  {marks}",
        flush=True,
    )
    return verdicts


def real_samples(rank: int, count: int) -> list[dict[str, Any]]:
    """Return 8 answers each to questions on pictures of 1,024 patches."""
    rng = np.random.default_rng(rank)
    adapter, found = adapter_for(real_config()), []
    for number in range(count):
        question = rng.integers(0, 1000, int(rng.integers(20, 80)))
        anchors = [adapter.vision_start, *[adapter.media_tokens["image"]] * 256, adapter.vision_end]
        pixels = torch.from_numpy(rng.standard_normal((1024, adapter.patch_dim), np.float32))
        for answer in range(8):
            tokens = rng.integers(0, 1000, int(np.clip(rng.lognormal(3.2, 0.7), 4, 200)))
            ids = torch.tensor([*anchors, *question, 1000 + answer, *tokens])
            found.append({
                "input_ids": ids,
                "labels": torch.where(torch.arange(len(ids)) < len(anchors) + len(question), -100, ids),
                "mm_token_type_ids": (ids == adapter.media_tokens["image"]).long(),
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([[1, 32, 32]]),
                "group_id": f"{rank}/{number}",
            })  # fmt: skip
    return found


def real_config() -> Any:
    """Return the settings of a tiny Qwen2.5-VL with a small vocabulary."""
    import transformers

    text = dict(
        hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=2048, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    vision = dict(hidden_size=64, out_hidden_size=64, intermediate_size=128, depth=4, num_heads=4, fullatt_block_indexes=[1, 3])
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=2001, video_token_id=2002, vision_start_token_id=2003,
        vision_end_token_id=2004, tie_word_embeddings=True,
    )  # fmt: skip


def real_model() -> Any:
    """Return a tiny random Qwen2.5-VL."""
    import transformers

    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(real_config()).train()


def through_packs(model: Any, samples: list[dict[str, Any]], groups: str, steps: int) -> float:
    """Train on packs; return tokens of the members per second, as if none were shared."""
    config = SchedulerConfig(
        max_tokens=4096, samples_per_step=2 if groups != "split" else 16, groups=groups, sync="step",  # type: ignore[arg-type]
    )  # fmt: skip
    adapter = adapter_for(model.module.config)
    with PackingScheduler(samples, config=config, adapter=adapter, groups=ProcessGroups.from_world()) as scheduler:
        dist.barrier()
        started = time.perf_counter()
        for step in scheduler:
            for batch in step:
                with step.sync_on_last(model, batch):
                    step.loss(model(**batch.forward_kwargs(model)).logits, batch).backward()
            model.zero_grad()
        dist.barrier()
    return steps / (time.perf_counter() - started)


def padded(model: Any, samples: list[dict[str, Any]], steps: int) -> float:
    """Train on padded batches, the answers to a question in one, a picture for each, as the stock trainers do."""
    dist.barrier()
    started = time.perf_counter()
    for first in range(0, len(samples), 16):
        for part in (samples[first : first + 8], samples[first + 8 : first + 16]):
            rows = {
                name: torch.nn.utils.rnn.pad_sequence([one[name] for one in part], batch_first=True, padding_value=value)
                for name, value in (("input_ids", 0), ("labels", -100), ("mm_token_type_ids", 0))
            }
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one["input_ids"]) for one in part], batch_first=True)
            media = {name: torch.cat([one[name] for one in part]) for name in ("pixel_values", "image_grid_thw")}
            model(**rows, **media, attention_mask=mask).loss.backward()
        model.zero_grad()
    dist.barrier()
    return steps / (time.perf_counter() - started)


def real(rounds: int, steps: int) -> list[bool]:
    """Print steps a second of the three ways on two pinned ranks, and their ratios."""

    def fn(rank: int, num_ranks: int) -> list[list[float]]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})  # type: ignore[operator]
        torch.set_num_threads(1)
        samples, stock = real_samples(rank, 2 * steps), real_model()
        packs = torch.nn.parallel.DistributedDataParallel(prepare_model(real_model()))
        batches = torch.nn.parallel.DistributedDataParallel(stock)
        ways = [
            lambda: through_packs(packs, samples, "prompt", steps),
            lambda: through_packs(packs, samples, "split", steps),
            lambda: padded(batches, samples, steps),
        ]
        for way in ways:
            way()
        return [[way() for way in ways] for _ in range(rounds)]

    found = np.array(run_ranks(fn, 2, backend="gloo", timeout=900.0)[0])
    ratios = found[:, :1] / found[:, 1:]
    verdicts = []
    for column, (name, target) in enumerate((("split", 2.0), ("padded", 3.0))):
        median, spread = float(np.median(ratios[:, column])), float(np.ptp(ratios[:, column]))
        verdicts.append(median >= target)
        print(
            f"2 ranks, 8 answers to a picture: {found[:, 0].mean():.2f} steps a second, {median:.2f} x {name} "
            f"(spread {spread:.2f}; target {target:g})  {'pass' if verdicts[-1] else 'MISS'}",
            flush=True,
        )
    return verdicts


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    options = parser.parse_args()
    verdicts = []
    for name in ROWS:
        for sync in ("step", "microbatch"):
            verdicts += simulated(name, sync, 1 if options.quick else 3)
    verdicts += real(*((2, 2) if options.quick else (5, 3)))
    print(f"{sum(verdicts)} of {len(verdicts)} pass")
    sys.exit(0)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    main()
