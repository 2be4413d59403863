"""`evaluate` and `predict` of a Trainer, on packs."""

from typing import Any

import torch

from .evaluation import Totals, from_all_ranks, padded

#: What the mixin stands in front of: `transformers.Trainer`, or a class derived from it.
_Trainer: Any = object


class PackedEvaluation(_Trainer):  # type: ignore[misc]
    """The part of `PackedTrainerMixin` that evaluates."""

    model: Any
    model_wrapped: Any
    control: Any

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate or predict: every sample once; the loss is the mean over all targets, not over batches."""
        from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

        args, model = self.args, self._evaluated_model()
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        totals = Totals(reduce=self.preprocess_logits_for_metrics, keeps=not loss_only, device=args.device)
        try:
            for step in dataloader:
                with torch.no_grad(), self.accelerator.autocast():
                    totals.add(step, lambda batch: self._packed_logits(model, batch), args.device)
                self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
        finally:
            dataloader.dataset.close()
        predictions = padded(from_all_ranks(totals.predictions, args.world_size))
        labels = padded(from_all_ranks(totals.labels, args.world_size))
        metrics: dict[str, Any] = {f"{metric_key_prefix}_loss": totals.loss()}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            found: Any = self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))
            plain: Any = denumpify_detensorize(found)
            for key, value in plain.items():
                metrics[key if key.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{key}"] = value
        kept: Any = predictions  # None where only the loss was asked for
        return EvalLoopOutput(predictions=kept, label_ids=labels, metrics=metrics, num_samples=totals.num_samples)

    def _evaluated_model(self) -> Any:
        if self.is_fsdp_enabled and self.model_wrapped is self.model and not self.accelerator._models:
            self.model = self.model_wrapped = self.accelerator.prepare(self.model)
        # Otherwise it is left as it is: accelerate would take a model that it prepared for an evaluation for one that is
        # ready to train, and never put it into DDP.
        return self.model
