"""One optimizer step, ready to train on."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, get_args, overload

import msgspec
import numpy as np
import torch

from ..collate import PackedBatch, pack_samples
from ..core import Sample, SampleGroup, members_of
from ..models import ModelAdapter, dummy_sample, dummy_text
from .comm.channel import Channel
from .comm.transports import TransportError
from .config import SchedulerConfig
from .grad_sync import reduce_if, refuse_ddp, refuse_fsdp
from .loss import Divisor, Reduce, packed_loss
from .plan import MediaTowers, SampleTable, StepPlan
from .plan.settings import MEDIA_BITS, check_literal
from .stages.gather import Gathered
from .stages.return_home import return_home
from .stats import StepStats


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps of one scheduler share.

    Attributes:
        adapter: the model family.
        config: settings.
        towers: media towers of the adapter, as the planner knows them.
        rank: this rank within the data-parallel group.
        cp_size: context-parallel size.
        num_replicas: ranks over which a wrapper averages gradients.
        channel: connection to the peers, for `return_home`.
        pin: build packs in pinned memory.
        is_writer: this process writes logs for the group, as `ProcessGroups.is_writer`.
        planner: name of the function that plans.
        phases: names of the cost's phases.
    """

    adapter: ModelAdapter
    config: SchedulerConfig
    towers: MediaTowers
    rank: int
    cp_size: int
    num_replicas: int
    channel: Channel
    pin: bool = False
    is_writer: bool = True
    planner: str = ""
    phases: tuple[str, ...] = ()


class PackedStep(Sequence[PackedBatch]):
    """The M micro-batches of this rank for one optimizer step; each is packed when it is asked for.

    A process that is forked off may use packs of its parent, but not ask a step for them: the samples lie in memory that other
    ranks write to again once the parent is done with it.

    Attributes:
        plan: where every sample of the group went.
        table: the samples of the group.
        num_microbatches: M, the same on every rank.
        global_loss_tokens: targets that count, over the whole group.
        loss_divisor: what the loss of the step is divided by: the sum of the loss weights over the group, or, for
            `loss_average="sample"`, the number of samples that have a target.
        num_samples: samples over the whole group, members of groups one by one.
        num_groups: groups over the whole group (`SchedulerConfig.groups`); a sample without one counts as one.
        seqlen_sum: real tokens of the group's samples; what members of a group share counts once.
        seqlen_squared_sum: sum of the squares of the samples' lengths.
        padded_seqlen_sum: their tokens, padded to `align`.
        padded_seqlen_squared_sum: sum of the squares of those.
        stats: figures of the step.
        home_ids: `sample_id` of every sample that this rank brought to the step, in the order of `return_home`.
    """

    def __init__(
        self,
        context: StepContext,
        *,
        table: SampleTable,
        plan: StepPlan,
        gathered: Gathered,
        samples: Mapping[int, Sample | SampleGroup],
        stats: StepStats,
        media_dtype: torch.dtype = torch.float32,
        home_ids: Sequence[Sequence[str | int | None]] = (),
    ) -> None:
        self._context = context
        self._process = os.getpid()
        self._samples = samples
        self._media_dtype = media_dtype
        self.home_ids = [name for names in home_ids for name in names]
        self._home_counts = [len(names) for names in home_ids]
        self.table = table
        self.plan = plan
        self.stats = stats
        self.num_microbatches = plan.num_microbatches
        kept = plan.rank >= 0
        self.global_loss_tokens = int(table.loss_tokens[kept].sum())
        self.num_samples = int(gathered.group_column("num_members")[kept].sum())
        self.num_groups = int(gathered.group_column("num_groups")[kept].sum())
        self._weights = gathered.records["weight"].astype(np.float64)
        self.loss_divisor = _divisor(gathered, self._weights, kept, context.config.loss_average)
        tokens, padded = table.tokens[kept], table.padded[kept]
        self.seqlen_sum = int(tokens.sum())
        self.seqlen_squared_sum = sum(gathered.group_column("tokens_squared")[kept].tolist())
        self.padded_seqlen_sum, self.padded_seqlen_squared_sum = int(padded.sum()), _sum_of_squares(padded)

    def __repr__(self) -> str:
        context, mine = self._context, self.plan.rank == self._context.rank
        counts = f"{int(mine.sum())} of {int((self.plan.rank >= 0).sum())} samples"
        tokens = f"{int(self.table.tokens[mine].sum())} of {self.seqlen_sum} tokens"
        packs = f"{self.num_microbatches} micro-batch{'es' if self.num_microbatches > 1 else ''}"
        ranks = f"rank {context.rank} of {context.num_replicas // context.cp_size}"
        return f"<PackedStep {self.stats.step}: {ranks}, {packs}, {counts}, {tokens}>"

    @property
    def context(self) -> StepContext:
        """What all steps of the scheduler share: settings, rank, connection."""
        return self._context

    @property
    def is_writer(self) -> bool:
        """Whether this process writes logs for the whole group."""
        return self._context.is_writer

    def __len__(self) -> int:
        return self.num_microbatches

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedBatch]: ...
    def __getitem__(self, index: int | slice) -> PackedBatch | list[PackedBatch]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"the step has {len(self)} micro-batches, asked for {index}")
        return self._pack(index % len(self))

    def __iter__(self) -> Iterator[PackedBatch]:
        return (self[index] for index in range(len(self)))

    def sync_on_last(self, model: Any, batch: PackedBatch) -> AbstractContextManager[None]:
        """Return a context in which the model's wrapper reduces gradients in the last micro-batch only.

        Args:
            model: in DDP, FSDP, FSDP2 or Megatron-Core's DDP, or bare.
            batch: one of this step's batches (or a copy of it on a device, or a shard).

        Raises:
            UnsafeModelError: DDP, where the last micro-batch may leave a trained tower out; FSDP, where a micro-batch may run a
                tower on some ranks alone.
            ValueError: a batch of another step.
        """
        if batch.step_number not in (None, self.stats.step):
            raise ValueError(f"the pack is of step {batch.step_number}, it runs in step {self.stats.step}")
        config = self._context.config
        refuse_ddp(model, config.sync, tuple(self._context.towers.trained))
        if not batch.microbatch:  # once a step: it looks at every module
            refuse_fsdp(model, config.sync, tuple(self._context.adapter.media_tokens))
        return reduce_if(model, batch.microbatch == self.num_microbatches - 1)

    def loss(self, logits: torch.Tensor, batch: PackedBatch, reduce: Reduce = "mean") -> torch.Tensor:
        """Return a micro-batch's share of the step's loss; see `scheduler.loss.packed_loss`.

        Args:
            logits: `[1, T, V]` of `batch`.
            batch: one of this step's batches, on the logits' device.
            reduce: "mean" where the wrapper averages gradients over replicas (DDP, FSDP), "sum" where it adds them up.

        Raises:
            ValueError: a batch of another step, or logits of another length.
        """
        if batch.step_number not in (None, self.stats.step):
            raise ValueError(f"the pack is of step {batch.step_number}, its loss was asked of step {self.stats.step}")
        divisor, replicas = self.loss_divisor, self._context.num_replicas
        return packed_loss(logits, batch, divisor=divisor, num_replicas=replicas, reduce=reduce)

    def factor(self, over: Divisor = "loss", reduce: Reduce = "mean") -> float:
        """Return what a sum over a micro-batch is multiplied by, so that the sums of all ranks' micro-batches make one mean.

        Args:
            over: "loss" for `loss_divisor`; "samples" or "groups" for their numbers in the whole step.
            reduce: as for `loss`.

        Example:
            A preference loss, one term per pair: ``(-logsigmoid(margins)).sum() * step.factor("groups")``.
        """
        check_literal("over", over, get_args(Divisor))
        check_literal("reduce", reduce, get_args(Reduce))
        divisor = {"loss": self.loss_divisor, "samples": self.num_samples, "groups": self.num_groups}[over]
        replicas = self._context.num_replicas if reduce == "mean" else 1
        return replicas / divisor if divisor else 0.0

    def return_home(self, values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor | None]:
        """Send per-sample results back to the ranks that brought the samples; collective.

        Args:
            values: for every micro-batch in order, one tensor per sample in pack order, members of groups one by one, as
                `PackedBatch.unpack` gives them. Any shapes; one dtype is not needed.

        Returns:
            One tensor on the host per sample that this rank brought to this step, in the order of `home_ids`; None where
            `oversize` dropped it from the plan. What was dropped before planning, or waits for a later step, is not among them.

        Raises:
            ValueError: another number of values than the packs have samples, or values that are no tensors.
            PeerFailedError: that happened on another rank.
            PeerLostError: timed out waiting for a rank, or lost it.
        """
        rows = [self.plan.ids(self._context.rank, index).tolist() for index in range(self.num_microbatches)]
        channel, samples = self._context.channel, self._samples
        counts = [[len(members_of(samples[row])) for row in pack] for pack in rows]
        try:
            found = return_home(channel.control, self.table, self.plan, rows, values, counts)
        except TransportError as error:
            raise channel.heartbeat.lost(error, "return_home") from error
        home: list[torch.Tensor | None] = []
        for returned, count in zip(found, self._home_counts, strict=True):
            home += [None] * count if returned is None else returned
        return home

    def _pack(self, index: int) -> PackedBatch:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"packs must be built in the process that owns the step ({self._process}), not in a fork ({os.getpid()})"
            )
        context, config = self._context, self._context.config
        rows = self.plan.ids(context.rank, index).tolist()
        dummies = self._dummies(index)
        scales = None
        if config.loss_average == "sample":
            scales = [scale for row in rows for scale in self._scales(row)]
            scales += [0.0] * len(dummies)
        align = config.segment_align(context.cp_size)
        static = {"max_segments": config.max_segments, "max_seqlen": config.pack_align} if config.static_shapes else {}
        batch = pack_samples(
            [*(self._samples[row] for row in rows), *dummies],
            adapter=context.adapter,
            align=align,
            pack_align=config.pack_align or align,
            **static,
            num_dummies=len(dummies),
            weight_scales=scales,
            pin_memory=context.pin,
        )
        return msgspec.structs.replace(batch, microbatch=index, step_number=self.stats.step)

    def _scales(self, row: int) -> list[float]:
        """Return the factors that make the weights of each sample of a row sum to 1."""
        sample = self._samples[row]
        if isinstance(sample, Sample):
            return [1.0 / float(self._weights[row]) if self.table.loss_tokens[row] else 0.0]
        stats = [member.target_stats() for member in sample.members]
        return [1.0 / weight if tokens else 0.0 for tokens, weight in stats]

    def _dummies(self, index: int) -> list[Sample]:
        rank, adapter = self._context.rank, self._context.adapter
        bits = int(self.plan.dummy_media[rank, index])
        media = [dummy_sample(name, adapter, self._media_dtype) for name, bit in MEDIA_BITS.items() if bits & bit]
        if self.plan.is_dummy[rank, index] and not media:
            return [dummy_text(adapter)]
        return media


def _sum_of_squares(values: np.ndarray) -> int:
    """Exact, in Python integers where 64 bits do not hold it."""
    most = int(values.max(initial=0))
    if most * most * len(values) < 2**63:
        return int((values * values).sum())
    return sum(value * value for value in values.tolist())


def _divisor(gathered: Gathered, weights: np.ndarray, kept: np.ndarray, average: str) -> float:
    if average == "sample":
        return float(gathered.group_column("num_trained")[kept].sum())
    total = math.fsum(weights[kept].tolist())  # exact, so the same on every machine
    assert total >= 0, total  # no weight is below 0
    return total
