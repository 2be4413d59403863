"""Tokens per second of a Trainer with packs against the same Trainer with padded batches, in one run.

    python -m benchmarks.trainer                      # 2 ranks, each pinned to a core, 16 samples a step
    python -m benchmarks.trainer --per-device 4 --steps 30

Both read the demo's images and text in the same order, encoded beforehand, so that every optimizer step of both has the same
samples. The opponent is the stock Trainer: it pads the samples of each rank to the longest one, and attends with PyTorch's
scaled dot product. Real tokens are counted, padding is not. The two take turns, and the ratio is the median of the rounds'.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from evenpack.integrations.trainer import PackedTrainerMixin
from evenpack.scheduler.plan import warm_up
from evenpack.scheduler.testing import run_ranks

from .end_to_end.padded import collate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from demo.data import ChatExamples
from demo.model import build_model
from demo.processing import encode, make_processor
from demo.tokenizer import train_tokenizer

RANKS, FAMILY, MAX_TOKENS = 2, "qwen2_5_vl", 2048
#: Steps at the start of each training that are not timed.
WARM_STEPS = 2


class PackedTrainer(PackedTrainerMixin, Trainer):
    """The Trainer with packs."""


class Clock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def encoded_samples(tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return the demo's samples of both ranks, in turn."""
    processor = make_processor(FAMILY, tokenizer)
    sources = [ChatExamples(0, rank, RANKS) for rank in range(RANKS)]
    return [encode(processor, sources[index % RANKS][index // RANKS]) for index in range(count)]


def timed(packs: bool, tokenizer: Any, samples: list[dict[str, Any]], per_device: int, steps: int) -> float:
    """Train from the same start and return the seconds of the timed steps."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=per_device, max_steps=WARM_STEPS + steps,
            train_sampling_strategy="sequential", report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
            remove_unused_columns=False, dataloader_pin_memory=False, learning_rate=1e-3,
        )  # fmt: skip
        parts: dict[str, Any] = {"model": build_model(FAMILY, tokenizer, 0), "args": args, "train_dataset": samples}
        if packs:
            trainer: Trainer = PackedTrainer(**parts, packing={"max_tokens": MAX_TOKENS}, callbacks=[clock])
        else:
            trainer = Trainer(**parts, data_collator=collate, callbacks=[clock])
        trainer.train()
    return clock.ends[-1] - clock.ends[WARM_STEPS - 1]


def main() -> None:
    """Run the rounds and print both speeds and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--per-device", type=int, default=8, help="samples per rank and optimizer step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    options = parser.parse_args()
    per_step, skipped = RANKS * options.per_device, RANKS * options.per_device * WARM_STEPS
    warm_up()
    tokenizer = train_tokenizer()
    samples = encoded_samples(tokenizer, per_step * (WARM_STEPS + options.steps))
    tokens = sum(len(sample["input_ids"]) for sample in samples[skipped:])

    def rounds(rank: int, num_ranks: int) -> list[tuple[float, float]]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        arguments = (tokenizer, samples, options.per_device, options.steps)
        return [(timed(True, *arguments), timed(False, *arguments)) for _ in range(options.rounds)]

    pairs = run_ranks(rounds, RANKS, backend="gloo", timeout=3600)[0]
    for name, seconds in zip(("packs", "padded"), zip(*pairs, strict=True), strict=True):
        speeds = [tokens / value for value in seconds]
        print(f"{name:7} {statistics.median(speeds):8.0f} tokens/s  (rounds: {', '.join(f'{speed:.0f}' for speed in speeds)})")
    ratios = [padded / packs for packs, padded in pairs]
    print(f"ratio   {statistics.median(ratios):8.2f} x         (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
