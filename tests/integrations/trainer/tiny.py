"""Models, data and a recording Trainer that the tests share. Import it before ranks are forked."""

import copy

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from evenpack.integrations.trainer import PackedTrainerMixin

from ...scheduler.helpers import IMAGE, mixed_source
from ...scheduler.test_training import tiny_qwen

PAD = 104
RANKS, PER_DEVICE = 2, 3


class PackedTrainer(PackedTrainerMixin, Trainer):
    """What a user writes."""


class Recorder(TrainerCallback):
    """Keeps the reduced gradients of every step, before they are clipped away or applied."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = [p for p in model.parameters() if p.requires_grad]
        grads = [(torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten() for p in trained]
        self.gradients.append(torch.cat(grads).double().numpy())


class Killed(Exception):
    """What ends a training in the middle."""


class Kill(TrainerCallback):
    """Ends a training right behind the checkpoint of a step, with the next step prepared and never trained."""

    def __init__(self, at):
        self.at = at

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise Killed


def model_of(dtype=torch.float32, lora=False):
    """Return a tiny Qwen2.5-VL, or one whose decoder trains adapters of PEFT only."""
    model = tiny_qwen(dtype)
    model.config.pad_token_id = model.config.text_config.pad_token_id = PAD
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = r".*language_model.*(q_proj|v_proj|down_proj)"
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="gaussian"))


def samples(count):
    """Return samples of text and images in turn, with labels."""
    pairs = zip(mixed_source(0, count), mixed_source(1, count), strict=True)
    data = [copy.copy(sample) for pair in pairs for sample in pair][:count]
    for index, sample in enumerate(data):
        sample["labels"] = sample["input_ids"].masked_fill(sample["input_ids"] == IMAGE, -100)
        sample["sample_id"] = index
    return data


def arguments(folder, **settings):
    """Return `TrainingArguments` for the CPU, with a log line for every step."""
    defaults = dict(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=PER_DEVICE, per_device_eval_batch_size=2,
        max_steps=20, logging_steps=1, logging_nan_inf_filter=False, report_to=[], disable_tqdm=True, save_strategy="no",
        optim="sgd", learning_rate=0.05, lr_scheduler_type="constant", data_seed=5, remove_unused_columns=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return TrainingArguments(**{**defaults, **settings})


def packed_trainer(model, args, *, packing=None, callbacks=(), **more):
    """Return the packed Trainer and its recorder."""
    recorder = Recorder()
    trainer = PackedTrainer(
        model, args, packing={"max_tokens": 96, "timeout": 30.0, **(packing or {})}, callbacks=[recorder, *callbacks], **more
    )
    return trainer, recorder


def losses_of(trainer):
    """Return the logged losses by step."""
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def single_row(rows):
    """Collate one sample as a row of its own: what a stock Trainer runs without padding."""
    (sample,) = rows
    batch = {name: value for name, value in sample.items() if name in ("pixel_values", "image_grid_thw")}
    batch |= {name: sample[name][None] for name in ("input_ids", "labels")}
    return batch | {"mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}


def relative(a, b):
    """Return the difference of two vectors, relative to the second."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
