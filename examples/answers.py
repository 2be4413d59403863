"""Answers to questions about digits: pairs for preference training, and groups of answers with rewards."""

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from demo.data import ChatExample, digit_chat
from demo.pictures import Digits
from demo.processing import encode


def start() -> tuple[int, int]:
    """Join the process group over gloo; return rank and number of ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def read_groups(
    processor: Any, rank: int, count: int, answers: int, dtype: torch.dtype = torch.float32
) -> Iterator[dict[str, Any]]:
    """Yield samples of one rank, the answers to one question after another; the first answer of each is right.

    Args:
        processor: of the family that trains.
        rank: this rank.
        count: questions.
        answers: answers to each, of different lengths.
        dtype: of the pixels.

    Yields:
        Samples with `group_id`, and `reward`, the share of digits that are right.
    """
    digits = Digits("train")
    for number in range(count):
        rng = random.Random(f"{rank}/{number}")
        chosen = [rng.randrange(len(digits)) for _ in range(rng.randrange(1, 4))]
        right = [digits.labels[index] for index in chosen]
        images = [digits.image(index) for index in chosen]
        for answer in range(answers):
            wrong = [(label + 1 + rng.randrange(9)) % 10 for label in right] + [rng.randrange(10)] * rng.randrange(0, 4)
            given = right if not answer else wrong
            messages = digit_chat(images, "Which digits?", given)
            sample = encode(processor, ChatExample(messages, f"{rank}/{number}/{answer}"))
            reward = sum(a == b for a, b in zip(given, right, strict=False)) / len(given)
            sample["pixel_values"] = sample["pixel_values"].to(dtype)
            yield sample | {"group_id": f"{rank}/{number}", "reward": torch.tensor(reward)}


def log_probs(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the log-probability of each slot's target, `[T]`, 0 where there is none."""
    wide = logits[0] if logits.dtype == torch.float64 else logits[0].float()
    each = torch.nn.functional.cross_entropy(wide, batch.labels[0], ignore_index=-100, reduction="none")
    return -each * batch.loss_mask[0].to(each.dtype)
