"""`PackedTrainerMixin`: a Trainer whose batches are balanced packs."""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...collate import PackedBatch, verify_isolation
from ...core import Field, UnsafeModelError
from ...models import ModelAdapter
from ...models.setup.unwrap import unwrap_model
from ...scheduler import CostModel, PackedStep, PackingScheduler, ProcessGroups, SchedulerConfig, StepCallback
from .checkpoint import load_state, save_state
from .evaluate import PackedEvaluation
from .records import Records
from .settings import eval_config, refuse_arguments, refuse_loss, refuse_parts, train_config
from .setup import adapter_of, is_lora, prepare_for_packs
from .source import Encode, Reading, source_of
from .stream import StepStream, epoch_steps, loader_of
from .weights import restore_weights


class PackedTrainerMixin(PackedEvaluation):
    """Packs the batches of a Trainer; put it in front: `class MyTrainer(PackedTrainerMixin, Trainer)`.

    One batch of the Trainer is one `PackedStep`: `per_device_train_batch_size` samples per rank make one optimizer step, which
    runs as the micro-batches that `max_tokens` allows, with one reduction of the gradients. Optimizer, schedules, callbacks,
    checkpoints and clipping are the Trainer's.

    Args:
        *args: the Trainer's.
        packing: the scheduler's settings. In a mapping, `samples_per_step`, `sync`, `on_exhausted` and `timeout` follow
            from the Trainer's arguments.
        encode: from a row of the datasets to a sample, such as `SampleEncoder.encode`; None where rows are samples.
        adapter: the model family; default: that of the model. Which towers are trained, the model says.
        fields: further fields of the samples.
        cost: cost of a sample; default: that of the model.
        packing_callbacks: callbacks of the scheduler that trains, such as a `RunLog`; the Trainer's own are `callbacks`.
        verify: run samples in a pack and alone before training, and compare (see `verify_isolation`): samples that
            `processing_class` makes, where it is a processor, else texts.
        **kwargs: the Trainer's.

    Raises:
        ValueError: arguments of the Trainer that cannot work with packing.
        UnsafeModelError: a model that would mix the samples of a pack.

    Example:
        >>> class MyTrainer(PackedTrainerMixin, Trainer): ...                              # doctest: +SKIP
        >>> trainer = MyTrainer(model, args, train_dataset=samples, packing={"max_tokens": 8192})  # doctest: +SKIP
        >>> trainer.train()                                                                # doctest: +SKIP
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        packing: SchedulerConfig | Mapping[str, Any],
        encode: Encode | None = None,
        adapter: ModelAdapter | None = None,
        fields: Iterable[Field] = (),
        cost: CostModel | None = None,
        packing_callbacks: Iterable[StepCallback] = (),
        verify: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_loss(type(self))
        refuse_parts(inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments)
        self._packing_encode, self._packing_fields = encode, tuple(fields)
        super().__init__(*args, **kwargs)
        refuse_arguments(self.args)
        if self.is_deepspeed_enabled:  # an accelerate config may say so, too
            raise ValueError("DeepSpeed does not work with packing: it counts micro-batches by itself; use DDP or FSDP")
        prepare_for_packs(self.model, adapter)
        self._packing_adapter = adapter_of(self.model, adapter)
        if verify:
            processor = getattr(self, "processing_class", None)
            makes_media = hasattr(processor, "tokenizer")
            verify_isolation(self.model, self._packing_adapter, processor=processor if makes_media else None)
        is_sharded = self.is_fsdp_enabled or getattr(self, "is_distributed_loading_by_transformers", False)
        self._packing_config = train_config(packing, self.args, is_sharded=is_sharded)
        self._packing_cost = cost or CostModel.from_config(
            unwrap_model(self.model).config,
            trained_modalities=self._packing_adapter.trained_modalities,
            lora=is_lora(self.model),
        )
        self._packing_callbacks = tuple(packing_callbacks)
        self._packing_stream: StepStream | None = None
        self._packing_records = Records()

    # Data

    def get_train_dataloader(self) -> Any:
        """Return a loader of this rank's steps."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        self._close_packing()
        shuffles = self.args.train_sampling_strategy == "random"
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._packing_stream = self._steps_of(
            self.train_dataset, self._packing_config, seed if shuffles else None, self._packing_callbacks
        )
        return loader_of(self._packing_stream)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of the steps that evaluate a dataset, or the one of a name in `eval_dataset`."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        return self.get_test_dataloader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of the steps that predict a dataset."""
        return loader_of(self._steps_of(test_dataset, eval_config(self._packing_config, self.args), None))

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples of an epoch over all ranks."""
        stream = dataloader.dataset
        if stream.num_samples is not None:
            return int(stream.num_samples)
        return int(len(dataloader) * self.args.train_batch_size * self.args.world_size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the next step; the number of its targets is the scheduler's to know."""
        return list(itertools.islice(epoch_iterator, num_batches)), None

    def _steps_of(
        self, dataset: Any, config: SchedulerConfig, seed: int | None, callbacks: Iterable[StepCallback] = ()
    ) -> StepStream:
        args, groups = self.args, ProcessGroups.from_world()
        dataset = self._declared_columns(dataset)
        loader = {
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
        reading = Reading(rank=groups.rank, num_ranks=groups.num_ranks, seed=seed, encode=self._packing_encode, loader=loader)
        scheduler = PackingScheduler(
            source_of(dataset, reading),
            config=config,
            adapter=self._packing_adapter,
            groups=groups,
            cost=self._packing_cost,
            fields=self._packing_fields,
            callbacks=callbacks,
        )
        size = len(dataset) if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") else None
        return StepStream(scheduler, num_samples=size, num_steps=epoch_steps(size, groups.num_ranks, scheduler))

    def _declared_columns(self, dataset: Any) -> Any:
        """Leave out the columns of a `datasets` table that no field is declared for, as `remove_unused_columns` says."""
        columns = getattr(dataset, "column_names", None)
        if not self.args.remove_unused_columns or self._packing_encode is not None or not isinstance(columns, list):
            return dataset
        declared = {"attention_mask", *(field.name for field in (*self._packing_adapter.fields, *self._packing_fields))}
        return dataset.select_columns([name for name in columns if name in declared])

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # TRL's `SFTTrainer` tokenizes here, also what `evaluate` is given; with `encode`, rows stay as they are until read.
        return dataset if self._packing_encode is not None else super()._prepare_dataset(dataset, *args, **kwargs)

    # Training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and close the scheduler at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_packing()

    def training_step(self, model: nn.Module, inputs: PackedStep, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run the micro-batches of a step, backward passes included; gradients are reduced in the last one only.

        Returns:
            This rank's share of the loss, times the number of ranks: their mean is the step's loss.
        """
        if self.args.world_size > 1 and not (hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")):
            raise UnsafeModelError(f"{type(model).__name__} is in no wrapper that reduces gradients over the ranks")
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        total = torch.zeros((), device=self.args.device)
        for batch in inputs:
            batch = batch.to(self.args.device)
            with inputs.sync_on_last(model, batch):
                loss = inputs.loss(self._packed_logits(model, batch), batch)
                self.accelerator.backward(loss)
            total += loss.detach()
        self._packing_records.add(inputs.stats)
        return total

    def _packed_logits(self, model: nn.Module, batch: PackedBatch) -> torch.Tensor:
        with self.compute_loss_context_manager():
            logits: torch.Tensor = model(**batch.forward_kwargs(model)).logits
        return logits

    def floating_point_ops(self, inputs: PackedStep) -> int:
        """Return an estimate of the operations of this rank's packs: 6 per token and parameter."""
        rank = ProcessGroups.from_world().rank
        return 6 * int(inputs.plan.padded[rank].sum()) * int(self.model.num_parameters(exclude_embeddings=True))

    def _track_num_input_tokens(self, inputs: PackedStep) -> None:
        # Every rank knows the tokens of the whole group: nothing is gathered, so they are always counted.
        counts_all = self.args.include_num_input_tokens_seen in (True, "all")
        self.state.num_input_tokens_seen += inputs.stats.padded_tokens if counts_all else inputs.stats.tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the tokens seen so far and the means of the packing's figures since the last time beside a loss."""
        if "loss" in logs:
            logs.update(self._packing_records.take())
            logs["tokens_seen"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)

    # Checkpoints

    def _save_rng_state(self, output_dir: str) -> None:
        # The Trainer calls this on every rank of a checkpoint that can be resumed.
        super()._save_rng_state(output_dir)
        if self._packing_stream is not None:
            save_state(self._packing_stream.scheduler, output_dir, self.args.process_index)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self.is_fsdp_enabled:
            restore_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_fsdp_enabled:
            restore_weights(self.model, self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        stream = self._packing_stream
        if checkpoint is None or stream is None or self.args.ignore_data_skip:
            return
        load_state(stream.scheduler, checkpoint, self.args.process_index, self.args.world_size)
        steps = self.state.max_steps if stream.num_steps is None else stream.num_steps
        stream.placeholders = self.state.global_step % max(1, steps)

    def _close_packing(self) -> None:
        if self._packing_stream is not None:
            self._packing_stream.close()
            self._packing_stream = None
