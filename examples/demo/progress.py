"""What every step gained, as a progress bar and as a log."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from evenpack.scheduler import PackedStep

#: A terminal redraws the bar; a log file gets one line each time.
_SECONDS_PER_UPDATE = (0.2, 10.0)
_BAR = "{percentage:3.0f}% |{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {desc}"


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step over all ranks; one line of the log.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss per target.
        seconds: time since the step before.
        tokens: real tokens.
        padded_tokens: tokens that the packs occupy.
        padded_batch_tokens: tokens that padded batches of the same memory would occupy.
        imbalance_home: largest over mean load of the ranks, every sample staying where it was read.
        imbalance: the same with evenpack.
        efficiency: cost of the samples over what all ranks could do in the step's time: 1 where no rank waits.
        loads_home: load of each rank, every sample staying where it was read.
        loads: load of each rank with evenpack.
        num_microbatches: packs per rank.
        moved_bytes: bytes that crossed ranks.
        shuffle_bytes: bytes that a full shuffle would have moved.
        gap: how far the plan may be from the best one.
    """

    step: int
    loss: float
    seconds: float
    tokens: int
    padded_tokens: int
    padded_batch_tokens: int
    imbalance_home: float
    imbalance: float
    efficiency: float
    loads_home: list[int]
    loads: list[int]
    num_microbatches: int
    moved_bytes: int
    shuffle_bytes: int
    gap: float


class Progress:
    """Collects a record per step; rank 0 also shows them as a bar and writes them to a log.

    Args:
        num_steps: steps that will come.
        log: file of JSON lines, written anew.
        max_tokens: capacity of a pack, the memory that padded batches are compared at.
    """

    def __init__(self, num_steps: int, log: Path, *, max_tokens: int) -> None:
        self.records: list[StepRecord] = []
        self.log = log
        self._max_tokens = max_tokens
        self._is_shown = dist.get_rank() == 0
        self._num_steps = num_steps

    def __enter__(self) -> Self:
        if self._is_shown:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.log.open("w", encoding="utf-8")
        interval = _SECONDS_PER_UPDATE[0 if sys.stderr.isatty() else 1]
        self._bar: Any = tqdm(total=self._num_steps, bar_format=_BAR, mininterval=interval, disable=not self._is_shown)
        self._started = self._last = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
        if self._is_shown:
            self._file.close()

    def add(self, step: PackedStep, loss: float) -> None:
        """Record a step that was trained on."""
        now = time.perf_counter()
        record = _record(step, loss, now - self._last, self._max_tokens)
        self._last = now
        self.records.append(record)
        if self._is_shown:
            self._file.write(json.dumps(msgspec.to_builtins(record)) + "\n")
            self._bar.set_description_str(self._line(record), refresh=False)
            self._bar.update()

    def _line(self, record: StepRecord) -> str:
        totals = Totals.of(self.records)
        return (
            f"loss {record.loss:.2f} | {totals.tokens / (self._last - self._started):,.0f} tok/s"
            f" | imbalance {record.imbalance_home:.2f} -> {record.imbalance:.2f} | efficiency {record.efficiency:.0%}"
            f" | padding saved {totals.padding_batches - totals.padding_packs:.0%}"
            f" | moved {totals.moved_bytes / 1e6:.1f} MB"
        )


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run.

    Attributes:
        tokens: real tokens.
        seconds: time of all steps.
        imbalance_home: mean over steps, without evenpack.
        imbalance: mean over steps, with evenpack.
        efficiency: mean over steps.
        padding_batches: share of padding in padded batches.
        padding_packs: share of padding in packs.
        moved_bytes: bytes that crossed ranks.
        shuffle_bytes: bytes that full shuffles would have moved.
    """

    tokens: int
    seconds: float
    imbalance_home: float
    imbalance: float
    efficiency: float
    padding_batches: float
    padding_packs: float
    moved_bytes: int
    shuffle_bytes: int

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Self:
        """Sum up the records of a run."""
        tokens = sum(r.tokens for r in records)
        return cls(
            tokens=tokens,
            seconds=sum(r.seconds for r in records),
            imbalance_home=sum(r.imbalance_home for r in records) / len(records),
            imbalance=sum(r.imbalance for r in records) / len(records),
            efficiency=sum(r.efficiency for r in records) / len(records),
            padding_batches=1 - tokens / sum(r.padded_batch_tokens for r in records),
            padding_packs=1 - tokens / sum(r.padded_tokens for r in records),
            moved_bytes=sum(r.moved_bytes for r in records),
            shuffle_bytes=sum(r.shuffle_bytes for r in records),
        )


def padded_batch_tokens(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the tokens of one rank's samples in padded batches: each as many samples as fit, padded to its longest.

    Args:
        lengths: of the samples, in the order in which they are read.
        max_tokens: most tokens of a batch, padding included.

    Example:
        >>> padded_batch_tokens([2, 3, 4, 9], max_tokens=12)  # [2, 3, 4] padded to 4 each, and [9]
        21
    """
    total, count, longest = 0, 0, 0
    for length in lengths:
        if count and (count + 1) * max(longest, length) > max_tokens:
            total, count, longest = total + count * longest, 0, 0
        count, longest = count + 1, max(longest, length)
    return total + count * longest


def _record(step: PackedStep, loss: float, seconds: float, max_tokens: int) -> StepRecord:
    table, plan, stats = step.table, step.plan, step.stats
    loads_home = np.zeros(plan.num_ranks, np.int64)
    np.add.at(loads_home, table.home, table.cost.reshape(len(table), -1).sum(axis=1))
    lengths = [table.tokens[table.home == rank].tolist() for rank in range(plan.num_ranks)]
    return StepRecord(
        step=stats.step + 1,
        loss=loss,
        seconds=seconds,
        tokens=stats.tokens,
        padded_tokens=stats.padded_tokens,
        padded_batch_tokens=sum(padded_batch_tokens(one, max_tokens) for one in lengths),
        imbalance_home=stats.imbalance_home,
        imbalance=stats.imbalance,
        efficiency=stats.efficiency,
        loads_home=loads_home.tolist(),
        loads=plan.cost.sum(axis=(1, 2)).tolist(),
        num_microbatches=stats.num_microbatches,
        moved_bytes=stats.moved_bytes,
        shuffle_bytes=stats.shuffle_bytes,
        gap=stats.gap,
    )
