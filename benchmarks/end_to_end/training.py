"""Train one mode on this rank and measure it."""

import contextlib
import itertools
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from evenpack.cli.what_if.opponents.karmarkar_karp import karmarkar_karp_equal
from evenpack.integrations.megatron import next_fit_planner
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig, StepPlan
from evenpack.scheduler.cost.model import CostFit
from evenpack.scheduler.plan import plan_step

from .padded import PaddedStep, Sample, collate

#: Steps at the start that are trained, and whose losses count, but that are not timed.
WARM_STEPS = 1
LEARNING_RATE, MAX_GRADIENT_NORM = 5e-4, 1.0


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """A way to make batches of the samples that the ranks bring to a step."""

    title: str
    padded: bool = False
    by_length: bool = False
    planner: Callable[..., StepPlan] = plan_step
    settings: dict[str, Any] = {}


#: Letters as the report names them.
MODES = {
    "a": Mode(title="padded batches, in order of arrival", padded=True),
    "s": Mode(title="padded batches, sorted by length", padded=True, by_length=True),
    "b": Mode(title="packed on each rank alone", settings={"scope": "rank"}),
    "c": Mode(title="next-fit over the group (Megatron-Core)", planner=next_fit_planner),
    "d": Mode(title="Karmarkar-Karp, equal counts (verl)", planner=karmarkar_karp_equal),
    "e": Mode(title="evenpack"),
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all modes share.

    Attributes:
        capacity: most tokens of a batch or pack, padding included.
        samples_per_step: of each rank.
        steps: timed steps.
        cost: cost of samples and micro-batches, the same for all planners.
    """

    capacity: int
    samples_per_step: int
    steps: int
    cost: CostFit | None = None

    @property
    def num_samples(self) -> int:
        """Samples of a rank: one step more is read, so that the last timed step prepares a next one like all others."""
        return self.samples_per_step * (WARM_STEPS + self.steps + 1)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one training gave; the same on every rank but for the memory.

    Attributes:
        seconds: of the timed steps.
        cpu_seconds: CPU time of the timed steps, of each step that of the rank which used most: what the step would take on
            an idle machine; of the process on the host where the model runs on a GPU.
        tokens: real tokens of them, over all ranks.
        computed: tokens that the decoder ran on in them, over all ranks.
        num_microbatches: forward passes of this rank in them.
        losses: of every step.
        peak_bytes: largest memory so far: of the process on a CPU, allocated by this training on a GPU.
    """

    seconds: float
    cpu_seconds: float
    tokens: int
    computed: int
    num_microbatches: int
    losses: list[float]
    peak_bytes: int


def train(
    mode: Mode, make_model: Callable[[], PreTrainedModel], samples: Sequence[Sample], setting: Setting, device: torch.device
) -> Outcome:
    """Train from the start; collective.

    Args:
        mode: how batches are made.
        make_model: builds the model, equal on every rank.
        samples: `setting.num_samples` samples of this rank.
        setting: sizes.
        device: where the model runs.
    """
    model = make_model().to(device)
    if not mode.padded:
        model = prepare_model(model)
    wrapped = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, counted = [], torch.zeros(2, dtype=torch.int64, device=device)
    started, passes = 0.0, 0
    used = torch.zeros(WARM_STEPS + setting.steps, dtype=torch.float64, device=device)
    before = time.process_time()
    with _steps(mode, model, samples, setting, device) as steps:
        for index, step in enumerate(itertools.islice(steps, WARM_STEPS + setting.steps)):
            if index == WARM_STEPS:
                started = _now(device)
            losses.append(_forward_backward(wrapped, step, device))
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            used[index], before = time.process_time() - before, time.process_time()
            if index >= WARM_STEPS:
                begin = index * setting.samples_per_step
                mine = samples[begin : begin + setting.samples_per_step]
                real = sum(len(sample["input_ids"]) for sample in mine)
                counted += torch.tensor([real, _computed(step)], device=device)
                passes += len(_batches(step))
        seconds = _now(device) - started
    dist.all_reduce(counted)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return Outcome(
        seconds=seconds,
        cpu_seconds=float(used[WARM_STEPS:].sum()),
        tokens=int(counted[0]),
        computed=int(counted[1]),
        num_microbatches=passes,
        losses=losses,
        peak_bytes=_peak_bytes(device),
    )


Step = PaddedStep | PackedStep


@contextlib.contextmanager
def _steps(
    mode: Mode, model: PreTrainedModel, samples: Sequence[Sample], setting: Setting, device: torch.device
) -> Iterator[Iterator[Step]]:
    """Yield the iterator over a mode's steps; every one of them has the same samples in all modes."""
    each = setting.samples_per_step
    if mode.padded:
        starts = range(0, len(samples), each)
        yield (PaddedStep.of(samples[start : start + each], setting.capacity, mode.by_length, device) for start in starts)
        return
    assert setting.cost is not None, "costs are measured first"
    costs = {"microbatch_cost": setting.cost.microbatch_cost}
    config = SchedulerConfig(max_tokens=setting.capacity, samples_per_step=each, sync="step", **costs, **mode.settings)
    parts = dict(adapter=adapter_for(model.config), cost=setting.cost.model, groups=ProcessGroups.from_world())
    with PackingScheduler(samples, config=config, planner=mode.planner, **parts) as scheduler:
        yield scheduler


def _batches(step: Step) -> Sequence[Any]:
    return step.batches if isinstance(step, PaddedStep) else range(len(step))


def _computed(step: Step) -> int:
    if isinstance(step, PaddedStep):
        return step.computed_tokens
    return int(step.plan.padded[dist.get_rank()].sum())


def _forward_backward(model: DistributedDataParallel, step: Step, device: torch.device) -> float:
    """Run one step's batches, reduce gradients in the last one, and return the step's loss over all ranks."""
    run = _run_padded if isinstance(step, PaddedStep) else _run_packed
    total = torch.zeros((), device=device)
    for share in run(model, step, device):  # type: ignore[arg-type]
        total += share
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _run_padded(model: DistributedDataParallel, step: PaddedStep, device: torch.device) -> Iterator[torch.Tensor]:
    for position, rows in enumerate(step.batches):
        batch = {name: value.to(device) for name, value in collate([step.samples[row] for row in rows]).items()}
        labels = batch.pop("labels")
        last = position == len(step.batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = step.loss(model(**batch, use_cache=False).logits, labels)
            loss.backward()
        yield loss.detach()


def _run_packed(model: DistributedDataParallel, step: PackedStep, device: torch.device) -> Iterator[torch.Tensor]:
    for batch in step:
        batch = batch.to(device)
        with step.sync_on_last(model, batch):
            loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
            loss.backward()
        yield loss.detach()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _now(device: torch.device) -> float:
    """Return the time at which every rank has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


__all__ = ["MODES", "WARM_STEPS", "Mode", "Outcome", "Setting", "train"]
