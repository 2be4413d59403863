"""Train on packs: what a user's own loop looks like with evenpack. Started by `run.py`, one process per rank."""

import argparse
import itertools
import os
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, ProcessorMixin

from evenpack.models import ModelAdapter, adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig

from .data import ChatExamples
from .evaluate import held_out_accuracy
from .exactness import Exactness, check_exactness
from .model import build_model, count_parameters
from .processing import encode, make_processor
from .progress import Progress
from .report import write_report
from .run import make_parser
from .tokenizer import shared_tokenizer

#: Capacity of a pack. The longest document of the data has about 1300 tokens.
MAX_TOKENS = 2048
SAMPLES_PER_STEP = 16
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 10
MAX_GRADIENT_NORM = 1.0


class EncodedSamples(Dataset[dict[str, Any]]):
    """The samples that one rank reads, encoded when they are asked for."""

    def __init__(self, examples: ChatExamples, processor: ProcessorMixin, length: int) -> None:
        self._examples, self._processor, self._length = examples, processor, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return encode(self._processor, self._examples[index])


class Job(NamedTuple):
    """What the functions below share."""

    options: argparse.Namespace
    model: PreTrainedModel
    processor: ProcessorMixin
    samples: EncodedSamples
    adapter: ModelAdapter
    config: SchedulerConfig


def main() -> int:
    """Train, evaluate, report; the exit code is 0 if packing was exact."""
    options = make_parser().parse_args()
    device = start_rank()
    try:
        return run(options, device)
    finally:
        dist.destroy_process_group()


def run(options: argparse.Namespace, device: torch.device) -> int:
    """Do all that needs the process group.

    The wrapper around the model ends with this function, before the group does. Were it the last to hold the group, it would
    end the group's threads while it holds Python's lock, and a thread that still lets go of a tensor would wait for that lock.
    """
    job = prepare(options, device)
    wrapped = DistributedDataParallel(job.model)
    progress = Progress(options.steps, options.out / "steps.jsonl", max_tokens=MAX_TOKENS)
    exactness = train(job, wrapped, progress)
    accuracy = held_out_accuracy(job.model, job.processor, job.adapter)
    if dist.get_rank() == 0:
        write_report(options.out, progress.records, exactness, accuracy)
    return 0 if exactness.holds else 1


def start_rank() -> torch.device:
    """Join the process group, over NCCL where every rank has a GPU, and return this rank's device."""
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= num_local:
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.allow_tf32 = False  # The exactness check compares in full single precision.
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        return torch.device("cuda", local_rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def prepare(options: argparse.Namespace, device: torch.device) -> Job:
    """Build tokenizer, processor, model, this rank's samples and the settings of the packing."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = shared_tokenizer(options.out / "tokenizer", rank, dist.barrier)
    processor = make_processor(options.model, tokenizer)
    model = prepare_model(build_model(options.model, tokenizer, options.seed).to(device)).train()
    samples = EncodedSamples(ChatExamples(options.seed, rank, num_ranks), processor, options.steps * SAMPLES_PER_STEP)
    config = SchedulerConfig(max_tokens=MAX_TOKENS, samples_per_step=SAMPLES_PER_STEP, sync="step")
    if rank == 0:
        size = count_parameters(model) / 1e6
        ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on {device.type}"
        print(f"{options.model}, {size:.2f} million parameters, {ranks}, {options.steps} steps", flush=True)
    return Job(options, model, processor, samples, adapter_for(model.config), config)


def train(job: Job, model: DistributedDataParallel, progress: Progress) -> Exactness:
    """Run the training loop; return how the first step compared with its samples run alone."""
    loader = DataLoader(job.samples, batch_size=None)
    groups, cost = ProcessGroups.from_world(), CostModel.from_config(job.model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, job.options.steps))
    with PackingScheduler(loader, config=job.config, adapter=job.adapter, groups=groups, cost=cost) as scheduler:
        first = next(scheduler)
        exactness = check_first_step(job, model, first)
        with progress:
            for step in itertools.chain([first], scheduler):
                loss = forward_backward(model, step, job.model.device)
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
                progress.add(step, loss)
    return exactness


def check_first_step(job: Job, model: DistributedDataParallel, step: PackedStep) -> Exactness:
    """Compare the first step, packed, with the samples that the ranks brought to it, each run alone."""
    reference = build_model(job.options.model, job.processor.tokenizer, job.options.seed).to(job.model.device)
    reference.set_attn_implementation("sdpa")
    return check_exactness(model, reference, step, [job.samples[index] for index in range(SAMPLES_PER_STEP)])


def forward_backward(model: DistributedDataParallel, step: PackedStep, device: torch.device) -> float:
    """Run the packs of one step and return the step's loss over all ranks."""
    total = torch.zeros((), device=device)
    for batch in step:
        batch = batch.to(device)
        with step.sync_on_last(model, batch):
            logits = model(**batch.forward_kwargs(model)).logits
            loss = step.loss(logits, batch)
            loss.backward()
        total += loss.detach()
    # The wrapper averages gradients over ranks, so `step.loss` is scaled by their number; the mean undoes it.
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Return the share of the learning rate at a step: a short linear warm-up, then a linear decay."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / num_steps)


if __name__ == "__main__":
    sys.exit(main())
