"""Settings of the Trainer: those that packing would break are refused by name, the others work."""

import subprocess
import sys

import pytest
import torch
from transformers import Trainer

from evenpack.core import UnsafeModelError
from evenpack.integrations.trainer import PackedTrainerMixin
from evenpack.models.attention import varlen
from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from ...collate.test_isolation import built
from .tiny import PackedTrainer, arguments, losses_of, model_of, packed_trainer, relative, samples, single_row

REFUSED = [
    ({"gradient_accumulation_steps": 2}, {}, {}, "gradient_accumulation_steps=2"),
    ({"train_sampling_strategy": "group_by_length"}, {}, {}, "train_sampling_strategy='group_by_length'"),
    ({"train_sampling_strategy": "batch_rebalance"}, {}, {}, "train_sampling_strategy='batch_rebalance'"),
    ({"auto_find_batch_size": True}, {}, {}, "auto_find_batch_size=True"),
    ({"label_smoothing_factor": 0.1}, {}, {}, "label_smoothing_factor=0.1"),
    ({"neftune_noise_alpha": 5.0}, {}, {}, "neftune_noise_alpha=5.0"),
    ({"batch_eval_metrics": True}, {}, {}, "batch_eval_metrics=True"),
    ({"eval_do_concat_batches": False}, {}, {}, "eval_do_concat_batches=False"),
    ({"include_for_metrics": ["inputs"]}, {}, {}, "include_for_metrics"),
    ({"accelerator_config": {"split_batches": True}}, {}, {}, "split_batches=True"),
    ({"dataloader_drop_last": True}, {"on_exhausted": "drain"}, {}, "dataloader_drop_last"),
    ({}, {"samples_per_step": 7}, {}, "samples_per_step=7 disagrees with per_device_train_batch_size=3"),
    ({}, {"scope": "microbatch", "num_microbatches": 1, "samples_per_step": None}, {}, "scope='microbatch'"),
    ({}, {"max_token": 3}, {}, "max_token"),
    ({}, {}, {"data_collator": single_row}, "data_collator"),
    ({}, {}, {"compute_loss_func": single_row}, "compute_loss_func"),
]


class OwnLoss(Trainer):
    """A Trainer of the user's own, whose loss packing would not call."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss * 2


def test_a_loss_of_the_users_own_is_refused(tmp_path):
    class Packed(PackedTrainerMixin, OwnLoss):
        pass

    def fn(rank, num_ranks):
        with pytest.raises(ValueError, match=r"OwnLoss\.compute_loss does not work with packing: the loss is"):
            Packed(model_of(), arguments(tmp_path), packing={"max_tokens": 96})
        return True

    assert run_ranks(fn, 1, backend="gloo") == [True]


def test_refused_by_name(tmp_path):
    def fn(rank, num_ranks):
        for settings, packing, more, message in REFUSED:
            with pytest.raises(ValueError, match=message):
                trainer, _ = packed_trainer(model_of(), arguments(tmp_path, **settings), packing=packing, **more)
                trainer.train()
        with pytest.raises(ValueError, match="train_dataset"):
            packed_trainer(model_of(), arguments(tmp_path))[0].train()
        with pytest.raises(ValueError, match="eval_dataset"):
            packed_trainer(model_of(), arguments(tmp_path))[0].evaluate()

    run_ranks(fn, 1, backend="gloo")


def test_the_model_is_verified_before_training(tmp_path, monkeypatch):
    """A model that mixes segments is refused when the Trainer is made."""

    def trainer_of(family):
        model, adapter, processor = built(family, torch.float32)
        return PackedTrainer(
            model, arguments(tmp_path), processing_class=processor, adapter=adapter, packing={"max_tokens": 96}, verify=True
        )

    def fn(rank, num_ranks):
        assert trainer_of("gemma3") is not None
        monkeypatch.setattr(varlen, "lengths_of", lambda boundaries: [int(boundaries[-1])])
        with pytest.raises(UnsafeModelError, match="mixes the segments of a pack"):
            trainer_of("gemma3")
        return True

    assert run_ranks(fn, 1, backend="gloo") == [True]


def test_settings_that_change_no_course(tmp_path):
    """Clipped to a norm of 0.5, drained: the last step of the epoch has 1 sample, on one of two ranks."""

    def train(**more):
        args = arguments(tmp_path, max_steps=-1, num_train_epochs=1, max_grad_norm=0.5, **more)
        trainer, recorder = packed_trainer(model_of(), args, train_dataset=samples(13))
        trainer.train()
        return losses_of(trainer), recorder.gradients

    tolerances = [
        ({"activation_checkpointing": True}, 1e-6),
        ({"bf16": True}, 2e-2),
        ({"include_num_input_tokens_seen": "all"}, 0),
    ]

    def fn(rank, num_ranks):
        return train(), [train(**settings) for settings, _ in tolerances]

    for (expected, gradients), courses in run_ranks(fn, 2, backend="gloo"):
        for (losses, others), (settings, tolerance) in zip(courses, tolerances, strict=True):
            assert list(losses) == [1, 2, 3]
            assert max(abs(losses[step] - expected[step]) for step in losses) <= tolerance, settings
            assert max(map(relative, others, gradients)) <= 10 * tolerance, settings


def test_imports_no_trainer():
    """Whoever imports the bridges pays for none of the frameworks."""
    code = (
        "import sys, evenpack.integrations.trainer; "
        "print(sorted({'transformers', 'trl', 'accelerate', 'peft', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_drop_last_and_full_config(tmp_path):
    """A `SchedulerConfig` is taken as it is."""

    def fn(rank, num_ranks):
        args = arguments(tmp_path, max_steps=-1, num_train_epochs=2, dataloader_drop_last=True)
        config = SchedulerConfig(max_tokens=96, samples_per_step=3, on_exhausted="stop", timeout=30.0)
        trainer = PackedTrainer(model_of(), args, train_dataset=samples(13), packing=config)
        trainer.train()
        return list(losses_of(trainer))

    assert run_ranks(fn, 2, backend="gloo") == [[1, 2, 3, 4]] * 2


def test_number_of_steps_unknown(tmp_path):
    """A stream, cut by tokens: epochs begin again until `max_steps`."""

    def fn(rank, num_ranks):
        rows = samples(8)
        stream = dict(enumerate(rows)).values()
        settings = {"tokens_per_step": 120}
        trainer, _ = packed_trainer(model_of(), arguments(tmp_path, max_steps=5), train_dataset=stream, packing=settings)
        trainer.train()
        return list(losses_of(trainer))

    assert run_ranks(fn, 2, backend="gloo") == [[1, 2, 3, 4, 5]] * 2
