"""The packed Trainer against the stock one on the same samples, and what else users expect of a Trainer."""

import pytest
from transformers import Trainer

from evenpack.models.setup.unwrap import unwrap_model
from evenpack.scheduler.testing import run_ranks

from .tiny import PER_DEVICE, Recorder, arguments, losses_of, model_of, packed_trainer, relative, samples, single_row

STEPS = 20


@pytest.mark.parametrize(
    ("lora", "average"), [(False, "token"), pytest.param(True, "token", marks=pytest.mark.full), (False, "sample")]
)
def test_equals_stock_trainer(tmp_path, lora, average):
    """Shuffled, over more than two epochs; 42 samples are 7 whole steps, so that the stock Trainer repeats none.

    The stock Trainer runs one sample a micro-batch, which needs no padding. It divides by the targets of the group where the
    model's class says that it takes their number; Qwen2.5-VL's says no, and then it averages the micro-batches' means.
    """

    def packed(rank, num_ranks):
        settings = {"loss_average": average}
        trainer, recorder = packed_trainer(
            model_of(lora=lora), arguments(tmp_path), train_dataset=samples(42), packing=settings
        )
        assert trainer._packing_adapter.trained_modalities == (() if lora else ("image", "video"))
        trainer.train()
        assert trainer.state.num_input_tokens_seen == trainer.state.log_history[-2]["tokens_seen"]
        return losses_of(trainer), recorder.gradients

    def stock(rank, num_ranks):
        model, recorder = model_of(lora=lora), Recorder()
        unwrap_model(model).accepts_loss_kwargs = average == "token"
        args = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=PER_DEVICE)
        trainer = Trainer(model, args, train_dataset=samples(42), data_collator=single_row, callbacks=[recorder])
        trainer.train()
        return losses_of(trainer), recorder.gradients

    def both(rank, num_ranks):
        return packed(rank, num_ranks), stock(rank, num_ranks)

    for (losses, gradients), (expected_losses, expected_gradients) in run_ranks(both, 2, backend="gloo", timeout=120):
        assert list(losses) == list(expected_losses) == list(range(1, STEPS + 1))
        assert max(abs(losses[step] - expected_losses[step]) for step in losses) < 1e-5
        assert max(map(relative, gradients, expected_gradients)) < 1e-5
