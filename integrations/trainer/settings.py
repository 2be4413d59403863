"""Settings of the Trainer: which become the scheduler's, and which are refused because packing would break them."""

from collections.abc import Mapping
from typing import Any

from ...scheduler import SchedulerConfig

#: Settings of `TrainingArguments` (and of TRL's `SFTConfig`): name, values that work, why no other does.
_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("gradient_accumulation_steps", (1,), "a step is cut into micro-batches by max_tokens; raise per_device_train_batch_size"),
    ("train_sampling_strategy", ("random", "sequential"), "the scheduler balances lengths, the order of samples stays free"),
    ("group_by_length", (False, None), "the scheduler balances lengths, the order of samples stays free"),
    ("auto_find_batch_size", (False, None), "memory is bounded by max_tokens, not by a number of samples"),
    ("label_smoothing_factor", (0, None), "the loss is the packed cross entropy of the scheduler's step"),
    ("neftune_noise_alpha", (None,), "its noise is scaled by the length of a row, and a row here is many samples"),
    ("deepspeed", (None,), "DeepSpeed counts micro-batches by itself; use DDP or FSDP"),
    ("batch_eval_metrics", (False,), "the metric is computed once, over every sample"),
    ("eval_do_concat_batches", (True,), "predictions are handed over per sample, as one array"),
    ("include_for_metrics", ([], None), "compute_metrics gets predictions and labels"),
    ("packing", (False, None), "samples are packed by evenpack already"),
    ("eval_packing", (False, None), "samples are packed by evenpack already"),
    ("padding_free", (False, None), "samples are packed by evenpack already"),
    ("activation_offloading", (False, None), "its context spans one forward pass, and a step here has several"),
    ("loss_type", ("nll", None), "the loss is the packed cross entropy of the scheduler's step"),
)


def refuse_arguments(args: Any) -> None:
    """Refuse `TrainingArguments` that cannot work with packing.

    Raises:
        ValueError: naming the argument, its value, and the reason.
    """
    for name, working, reason in _ARGUMENTS:
        value = getattr(args, name, working[0])
        if value not in working:
            raise ValueError(f"{name}={value!r} does not work with packing: {reason}")
    if getattr(args, "_n_gpu", 0) > 1:
        raise ValueError("nn.DataParallel does not work with packing: start one process per GPU (torchrun)")
    accelerator = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name, None):
            raise ValueError(f"accelerator_config.{name}=True does not work with packing: every rank reads its own samples")
    sizes = getattr(args, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(sizes, name, 1) > 1:
            raise ValueError(f"parallelism_config.{name}={getattr(sizes, name)} does not work with packing in the Trainer")


def refuse_parts(given: Mapping[str, Any]) -> None:
    """Refuse arguments of the Trainer's constructor that packing would never call.

    Args:
        given: the constructor's arguments by name.

    Raises:
        ValueError: naming the argument and the reason.
    """
    reasons = {
        "data_collator": "samples stay unpadded until they are packed; encode them in the dataset, or with `encode`",
        "compute_loss_func": "the loss is the packed cross entropy of the scheduler's step",
        "model_init": "the model is set up for packs once; pass `model`",
    }
    for name, reason in reasons.items():
        if given.get(name) is not None:
            kind = type(given[name]).__name__
            raise ValueError(f"{name} ({kind}) does not work with packing: {reason}")


def refuse_loss(trainer: type) -> None:
    """Refuse a Trainer whose loss is another than cross entropy, which packing would never call.

    Args:
        trainer: the user's class.

    Raises:
        ValueError: naming the method that computes the loss.
    """
    method: Any = trainer.compute_loss  # type: ignore[attr-defined]
    if method.__module__ not in ("transformers.trainer", "trl.trainer.sft_trainer"):
        raise ValueError(
            f"{method.__qualname__} does not work with packing: the loss is the packed cross entropy of the scheduler's step; "
            "for another one, write a loop of your own (docs/beyond-sft.md has those of DPO, GRPO and reward models)"
        )


def train_config(packing: SchedulerConfig | Mapping[str, Any], args: Any, *, is_sharded: bool) -> SchedulerConfig:
    """Return the scheduler's settings, with what `TrainingArguments` say about the same things.

    Args:
        packing: the user's settings; of a mapping, those left out follow from `args`.
        args: `TrainingArguments`.
        is_sharded: FSDP: ranks wait for each other in every micro-batch.

    Raises:
        ValueError: the two disagree, or settings that the Trainer cannot serve.
    """
    if not isinstance(packing, SchedulerConfig):
        own: dict[str, Any] = {
            "sync": "microbatch" if is_sharded else "step",
            "on_exhausted": "stop" if args.dataloader_drop_last else "drain",
            "timeout": float(args.ddp_timeout),
        }
        if packing.get("tokens_per_step") is None:
            own["samples_per_step"] = args.per_device_train_batch_size
        packing = SchedulerConfig.from_dict({**own, **packing})
    if packing.scope == "microbatch":
        raise ValueError("scope='microbatch' needs a source of lists; a dataset of the Trainer holds samples")
    per_device = args.per_device_train_batch_size
    if packing.samples_per_step not in (None, per_device):
        raise ValueError(f"samples_per_step={packing.samples_per_step} disagrees with per_device_train_batch_size={per_device}")
    if is_sharded and packing.sync != "microbatch":
        raise ValueError("sync='step' would hang with FSDP, which waits in every micro-batch: set sync='microbatch'")
    if args.dataloader_drop_last and packing.on_exhausted != "stop":
        raise ValueError("dataloader_drop_last=True disagrees with on_exhausted='drain'")
    return packing


def eval_config(config: SchedulerConfig, args: Any) -> SchedulerConfig:
    """Return the settings of an evaluation: every sample once, and an error where one does not fit.

    Args:
        config: settings of the training.
        args: `TrainingArguments`.
    """
    return SchedulerConfig(
        max_tokens=config.max_tokens,
        samples_per_step=args.per_device_eval_batch_size,
        sync=config.sync,
        max_segments=config.max_segments,
        oversize="truncate" if config.oversize == "truncate" else "error",
        align=config.align,
        pack_align=config.pack_align,
        static_shapes=config.static_shapes,
        loss_average=config.loss_average,
        pixel_dtype=config.pixel_dtype,
        prefetch=config.prefetch,
        transport=config.transport,
        timeout=config.timeout,
    )
