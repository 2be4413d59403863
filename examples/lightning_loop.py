"""Lightning on packs, with the data of `ddp.py`: a module with manual optimization, whose batches are the scheduler's steps.

torchrun --standalone --nproc-per-node 2 examples/lightning_loop.py --steps 4
"""

import argparse
import itertools
import os

import lightning
import torch
from demo.data import ChatExamples
from demo.model import build_model
from demo.processing import encode, make_processor
from demo.tokenizer import train_tokenizer

from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig

SAMPLES_PER_STEP = 4  # per rank


class Steps:
    """Hands on the steps, not the state: Lightning would save rank 0's for all ranks."""

    def __init__(self, scheduler: PackingScheduler) -> None:
        self.scheduler = scheduler

    def __iter__(self) -> PackingScheduler:
        return iter(self.scheduler)


class PackedModule(lightning.LightningModule):
    """Trains on the steps of a scheduler, which begins when the process group is there."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False  # a step is several micro-batches and one update
        self.tokenizer, self.num_steps = train_tokenizer(), num_steps
        self.model = prepare_model(build_model("qwen2_5_vl", self.tokenizer, seed=0)).train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train_dataloader(self) -> Steps:
        """Return the steps of this rank's samples: text on rank 0, images on rank 1, both on further ranks."""
        rank, processor = self.global_rank, make_processor("qwen2_5_vl", self.tokenizer)
        examples = map(ChatExamples(0, rank, self.trainer.world_size).__getitem__, itertools.count())
        if rank < 2:
            examples = (example for example in examples if example.sample_id.startswith("document") == (rank == 0))
        samples = [encode(processor, example) for example in itertools.islice(examples, self.num_steps * SAMPLES_PER_STEP)]
        config = SchedulerConfig(max_tokens=2048, samples_per_step=SAMPLES_PER_STEP, sync="step")
        adapter, cost = adapter_for(self.model.config), CostModel.from_config(self.model.config)
        groups = ProcessGroups.from_world()
        self.scheduler = PackingScheduler(samples, config=config, adapter=adapter, cost=cost, groups=groups)
        return Steps(self.scheduler)

    def teardown(self, stage: str) -> None:
        """End the scheduler."""
        self.scheduler.close()

    def transfer_batch_to_device(self, step: PackedStep, device: torch.device, dataloader_idx: int) -> PackedStep:
        """Leave the step as it is: each of its micro-batches moves when it is due."""
        return step

    def training_step(self, step: PackedStep, index: int) -> None:
        """Run the micro-batches of a step, and update."""
        optimizer, total = self.optimizers(), torch.zeros((), device=self.device)
        for batch in step:
            batch = batch.to(self.device)
            with step.sync_on_last(self.trainer.model, batch):  # the wrapper, not this module
                loss = step.loss(self.model(**batch.forward_kwargs(self.model)).logits, batch)
                self.manual_backward(loss)
            total += loss.detach()
        self.clip_gradients(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss, stats = self.all_gather(total).mean().item(), step.stats
        self.print(f"step {stats.step + 1}: loss {loss:.4f}, {stats.tokens} tokens, imbalance {stats.imbalance:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=1, **quiet)
    trainer.fit(PackedModule(parser.parse_args().steps))
