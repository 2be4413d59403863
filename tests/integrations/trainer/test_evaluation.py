"""Evaluation: every sample once, on any number of ranks, with what the stock Trainer hands to a metric."""

import warnings

import numpy as np
import pytest
import torch
from transformers import Trainer

from evenpack.integrations.trainer.evaluation import padded, reduced, to_numpy
from evenpack.scheduler.testing import run_ranks

from .tiny import arguments, model_of, packed_trainer, samples, single_row

COUNT = 11


def best_ids(logits, labels):
    """Keep the best id of every token only; the stock Trainer hands over what else the model returns, too."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(-1)


def accuracy(prediction):
    """Return the share of targets that the token before them predicts, and how many samples there were."""
    ids, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((ids == labels)[counted].mean()), "samples": len(labels)}


def trained():
    """Return a model that has learned a little, so that some of its predictions are right."""
    model, rows = model_of(), [single_row([sample]) for sample in samples(COUNT)[::2]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for row in rows * 4:
        model(**row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def evaluated(folder):
    """Evaluate and predict; 11 samples divide neither by 2 ranks nor by 2 samples a rank and step."""
    trainer, _ = packed_trainer(
        trained(), arguments(folder), eval_dataset={"all": samples(COUNT), "one": samples(1)},
        compute_metrics=accuracy, preprocess_logits_for_metrics=best_ids,
    )  # fmt: skip
    return trainer.evaluate(), trainer.predict(samples(COUNT)), trainer.evaluate(samples(COUNT), metric_key_prefix="x")


def test_metric_and_predictions_equal_those_of_one_rank_and_of_the_stock_trainer(tmp_path):
    def stock(rank, num_ranks):
        args = arguments(tmp_path, per_device_eval_batch_size=1)
        trainer = Trainer(
            trained(), args, data_collator=single_row, compute_metrics=accuracy, preprocess_logits_for_metrics=best_ids
        )
        return trainer.predict(samples(COUNT))

    two = run_ranks(lambda rank, num_ranks: evaluated(tmp_path), 2, backend="gloo")
    ((metrics, predicted, again),) = run_ranks(lambda rank, num_ranks: evaluated(tmp_path), 1, backend="gloo")
    (expected,) = run_ranks(stock, 1, backend="gloo")
    assert np.array_equal(predicted.predictions, expected.predictions) and len(predicted.predictions) == COUNT
    # Nothing predicts the first token: its label is left out here, and by every metric of next tokens.
    assert np.array_equal(predicted.label_ids[:, 1:], expected.label_ids[:, 1:])
    assert metrics["eval_all_samples"] == COUNT and metrics["eval_one_samples"] == 1
    for two_metrics, two_predicted, _ in two:
        assert two_metrics["eval_all_accuracy"] == metrics["eval_all_accuracy"] == again["x_accuracy"] > 0
        assert two_metrics["eval_all_loss"] == pytest.approx(metrics["eval_all_loss"], rel=1e-6)
        assert np.array_equal(two_predicted.predictions, predicted.predictions)
        assert two_predicted.metrics["test_accuracy"] == expected.metrics["test_accuracy"]


def test_evaluation_during_training(tmp_path):
    """It changes nothing, before the first step neither: accelerate would leave the model out of DDP."""

    def fn(rank, num_ranks):
        logs = []
        for often in (False, True):
            more = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True} if often else {}
            trainer, _ = packed_trainer(
                model_of(), arguments(tmp_path, max_steps=4, **more), train_dataset=samples(20), eval_dataset=samples(5)
            )
            if often:
                trainer.evaluate()
            trainer.train()
            logs.append(trainer.state.log_history)
        return logs

    keys = ("loss", "grad_norm", "imbalance", "tokens_seen")
    for plain, often in run_ranks(fn, 2, backend="gloo"):
        assert [[line[key] for key in keys] for line in plain if "loss" in line] == [
            [line[key] for key in keys] for line in often if "loss" in line
        ]
        assert sum("eval_loss" in line for line in often) == 3  # the one before the training is forgotten by it


def test_the_loss_of_no_label_is_no_number(tmp_path):
    """On every rank; 0.0 would look like the best model there is."""
    rows = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in samples(3)]

    def fn(rank, num_ranks):
        trainer, _ = packed_trainer(model_of(), arguments(tmp_path), eval_dataset=rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = trainer.evaluate()["eval_loss"]
        return loss, [str(one.message) for one in caught if "no label of the" in str(one.message)]

    losses, texts = zip(*run_ranks(fn, 2, backend="gloo"), strict=True)
    assert np.isnan(losses).all() and [len(one) for one in texts] == [1, 0]


def test_values_of_a_metric():
    logits = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(reduced(logits, torch.tensor([1, 2, 3]), None), logits)
    assert reduced(logits, torch.tensor([1, 2, 3]), lambda x, y: y.sum(1))[()] == 6
    with pytest.raises(TypeError, match="one tensor, got tuple"):
        reduced(logits, torch.tensor([1, 2, 3]), lambda x, y: (x, y))
    assert to_numpy(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32
    assert padded([]) is None and padded([np.array(1), np.array(2)]).tolist() == [1, 2]
