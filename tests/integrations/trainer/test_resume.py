"""A training that stops and goes on has the losses of one that never stopped."""

import contextlib
import logging
import shutil

import pytest
import torch

from evenpack.integrations.trainer.checkpoint import load_state
from evenpack.integrations.trainer.source import OwnStream, Reading, SharedDataset, SharedStream, source_of
from evenpack.scheduler.testing import run_ranks

from .tiny import Kill, Killed, PackedTrainer, arguments, losses_of, model_of, packed_trainer, samples


@pytest.mark.parametrize("lookahead", [1, 3])
def test_kill_and_resume(tmp_path, lookahead):
    """At step 7 of 20, which is the end of the first epoch, and at step 10, in the middle of the second."""

    def train(folder, kill=None, resume=None, **settings):
        args = arguments(folder, **{"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, **settings})
        trainer, _ = packed_trainer(
            model_of(), args, train_dataset=samples(42), packing={"lookahead": lookahead}, callbacks=[Kill(kill)]
        )
        with pytest.raises(Killed) if kill else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=resume)
        return trainer, losses_of(trainer)

    def fn(rank, num_ranks):
        _, expected = train(tmp_path / "whole", save_strategy="no")
        _, first = train(tmp_path / "cut", kill=7)
        _, second = train(tmp_path / "cut", kill=10, resume=True)
        trainer, last = train(tmp_path / "cut", resume=True)
        epochs = [line["epoch"] for line in trainer.state.log_history if "loss" in line]
        return expected, first, second, last, epochs, trainer.state.log_history[-2]["tokens_seen"]

    for expected, first, second, last, epochs, tokens in run_ranks(fn, 2, backend="gloo", timeout=200):
        assert list(first.items()) == list(expected.items())[:7]
        assert last == expected == {**last, **second}
        assert epochs == pytest.approx([step / 7 for step in range(1, 21)])
        assert tokens == run_tokens() or lookahead > 1  # a window trains other samples in the steps before the last
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("before", "after", "last"), [(2, 1, 11), pytest.param(1, 2, 9, marks=pytest.mark.full)])
def test_resume_on_another_number_of_ranks(tmp_path, before, after, last):
    """Killed at step 3; the rest of the epoch is divided anew, however many steps it then takes."""

    class Noting(PackedTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            names.extend(name for batch in inputs for name in batch.sample_ids if name is not None)
            return super().training_step(model, inputs, num_items_in_batch)

    names = []

    def train(resume, **settings):
        args = arguments(tmp_path, save_strategy="steps", save_steps=3, **settings)
        packing = {"max_tokens": 96, "timeout": 30.0}
        trainer = Noting(model_of(), args, train_dataset=samples(42), packing=packing, callbacks=[Kill(None if resume else 3)])
        with contextlib.nullcontext() if resume else pytest.raises(Killed):
            trainer.train(resume_from_checkpoint=resume)
        return names

    first = run_ranks(lambda rank, num_ranks: train(False), before, backend="gloo")
    second = run_ranks(lambda rank, num_ranks: train(True, max_steps=last), after, backend="gloo")
    assert sum(map(len, first)) == 9 * before
    assert sorted(name for part in first + second for name in part) == list(range(42))


def run_tokens():
    """Return the tokens of 20 steps of 6 samples: two whole epochs, and 36 samples of the third."""
    data = samples(42)
    lengths = [len(sample["input_ids"]) for sample in data]
    third = SharedDataset(lengths, Reading(seed=5))
    third.load_state_dict({"epoch": 2, "skipped": 0, "count": 0})
    return 2 * sum(lengths) + sum(list(third)[:36])


def test_the_log_says_that_weights_of_other_names_were_loaded(tmp_path):
    """Behind the keys that transformers lists as missing: as a warning, because that is how they are listed."""

    def fn(rank, num_ranks):
        texts = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: texts.append(record.getMessage())
        for name in ("transformers", "evenpack"):
            logging.getLogger(name).addHandler(handler)
        saved, model = model_of(), model_of()
        args = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
        packed_trainer(saved, args, train_dataset=samples(6))[0].train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        trainer, _ = packed_trainer(model, args, train_dataset=samples(6))
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
        return texts, all(torch.equal(value, saved.state_dict()[name]) for name, value in model.state_dict().items())

    ((texts, is_loaded),) = run_ranks(fn, 1, backend="gloo")
    assert is_loaded and any("missing keys in the checkpoint" in text for text in texts[:-1])
    assert texts[-1].startswith("All weights of Qwen2_5_VLForConditionalGeneration were loaded from")


def test_checkpoint_of_another_trainer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no state of the packing"):
        load_state(None, tmp_path, 0, 1)


def read(source, count):
    """Read some samples; return them."""
    iterator = iter(source)
    return [next(iterator) for _ in range(count)]


def test_position_of_a_dataset():
    """Read 3 of 5, go on in another source, and in the next epoch, which has an order of its own."""
    reading = Reading(seed=1)
    first = SharedDataset(list("abcde"), reading)
    head = read(first, 3)
    second = SharedDataset(list("abcde"), reading)
    second.load_state_dict(first.state_dict())
    assert sorted(head + list(second)) == list("abcde")
    again = SharedDataset(list("abcde"), reading)
    whole = list(again)
    assert head == whole[:3] and list(again) == list(second) != whole
    iter(again), iter(again)  # epochs that are left before their end
    assert again.state_dict()["epoch"] == 3


@pytest.mark.parametrize(("counts", "later_ranks"), [((2, 2), 3), ((2, 1), 1), ((3, None), 2), ((0, 0), 2)])
def test_position_of_another_number_of_ranks(counts, later_ranks):
    """Every sample is read once: before by two ranks, of which None has read all, and after by others."""
    data = list(range(7))
    before, states = [], []
    for rank, count in enumerate(counts):
        source = SharedDataset(data, Reading(rank=rank, num_ranks=2))
        before += list(source) if count is None else read(source, count)
        states += [] if count is None else [source.state_dict()]
    after = []
    for rank in range(later_ranks):
        source = SharedDataset(data, Reading(rank=rank, num_ranks=later_ranks))
        source.load_state_dicts(states)
        after += list(source)
        assert len(list(source)) == len(data[rank::later_ranks])  # the next epoch is whole
    assert sorted(before + after) == data


def double(row):
    """Encode a row; leave 3 out."""
    return None if row == 3 else 2 * row


@pytest.mark.parametrize(
    ("dataset", "kind", "expected"),
    [
        (lambda: [1, 2, 3, 4, 5], SharedDataset, [2, [], 10]),
        (lambda: {1: 0, 2: 0, 3: 0}.keys(), SharedStream, [2, []]),
        (lambda: iter([1, 3]), OwnStream, [2, []]),
    ],
)
def test_kinds_of_datasets(dataset, kind, expected):
    source = source_of(dataset(), Reading(rank=0, num_ranks=2, encode=double))
    assert type(source) is kind and list(source) == expected


def test_workers_encode():
    """A worker process reads and encodes; the order stays."""
    reading = Reading(encode=double, loader={"num_workers": 1})
    assert list(SharedDataset([1, 2, 3, 4], reading)) == [2, 4, [], 8]


def test_streaming_dataset_is_split():
    from datasets import Dataset

    stream = Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset(num_shards=2)
    got = [row["x"] for rank in range(2) for row in source_of(stream, Reading(rank=rank, num_ranks=2))]
    assert sorted(got) == list(range(6))
