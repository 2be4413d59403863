"""What a scheduler is given or asked for by mistake: one clear error, before any rank waits for another."""

import threading

import pytest
import torch

from evenpack.collate import pack_samples
from evenpack.core import Field
from evenpack.models import adapter_for
from evenpack.scheduler import CostModel, PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, open_scheduler, random_source, text_sample

CONFIG = SchedulerConfig(max_tokens=64, samples_per_step=4)


def test_a_step_belongs_to_one_thread_at_a_time():
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        for sample in random_source(0, 12):
            yield sample
            inside.set()
            assert go_on.wait(20)

    with open_scheduler(slow(), prefetch=0) as scheduler:
        outcome = []
        other = threading.Thread(target=lambda: outcome.append(next(scheduler).stats.step), name="other")
        other.start()
        assert inside.wait(20)
        with pytest.raises(RuntimeError, match=r"next\(scheduler\) is running in another thread"):
            next(scheduler)
        go_on.set()
        other.join(20)
        # Between steps a scheduler may change hands; nothing was lost.
        assert outcome == [0] and [step.stats.step for step in scheduler] == [1, 2]


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [
        ("adapter", "txt", ValueError, "unknown model family 'txt'"),
        ("adapter", torch.nn.Linear(1, 1), TypeError, r"adapter must be a ModelAdapter .*adapter_for.*, got a Linear"),
        ("adapter", None, TypeError, "adapter must be .* got None"),
        ("config", {"max_tokens": 8}, TypeError, r"config must be a SchedulerConfig .*, got a dict"),
        ("config", SchedulerConfig, TypeError, r"config must be a SchedulerConfig .*, got the class SchedulerConfig"),
        ("cost", "7b", TypeError, "cost must be a CostModel .*, got '7b'"),
        ("cost", CostModel, TypeError, "cost must be a CostModel .*, got the class CostModel"),
        ("groups", "world", TypeError, "groups must be a ProcessGroups .*, got 'world'"),
        ("fields", ["x"], TypeError, r"fields must be Field\(\.\.\.\) declarations, got 'x' among them"),
        ("fields", Field(name="x", kind="token", dtype="int64"), TypeError, r"fields must be Field.* got a Field"),
        ("fields", 3, TypeError, r"fields must be Field.* got 3"),
        ("planner", 3, TypeError, "planner must be a function .*, got 3"),
        ("callbacks", print, TypeError, "callbacks must be a list of functions, got a builtin_function_or_method"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(argument, value, error, text):
    with pytest.raises(error, match=text):
        PackingScheduler([], **{"config": CONFIG, "adapter": TEXT, argument: value})


def test_an_adapter_may_be_named():
    for name in ("text", "qwen2_5_vl"):
        with PackingScheduler([text_sample(3, 0)], config=CONFIG, adapter=name) as scheduler:
            assert next(scheduler)[0].adapter.name == adapter_for(name).name


@pytest.mark.parametrize(
    ("cp_size", "settings", "text"),
    [
        (1, {"max_tokens": 64, "align": 128}, "max_tokens=64 is below align=128: no sample would fit"),
        (1, {"max_tokens": 64, "align": 32, "pack_align": 96}, "max_tokens=64 is below pack_align=96: no sample would fit"),
        (2, {"max_tokens": 3, "align": 8}, "max_tokens=3 times cp_size=2 is below align=8: no sample would fit"),
        (4, {"max_tokens": 1}, "max_tokens=1 times cp_size=4 is below align=8: no sample would fit"),
        (2, {"max_tokens": 64, "groups": "together"}, "groups='together' excludes context parallelism, got cp_size=2"),
        (2, {"max_tokens": 2}, None),
        (1, {"max_tokens": 64, "align": 64}, None),
    ],
)
def test_packs_that_hold_no_sample_are_refused_at_construction(cp_size, settings, text):
    config = SchedulerConfig(**settings, samples_per_step=1)
    groups = ProcessGroups(cp_size=cp_size)
    if text is None:
        PackingScheduler([], config=config, adapter=TEXT, groups=groups).close()
        return
    with pytest.raises(ValueError, match=text):
        PackingScheduler([], config=config, adapter=TEXT, groups=groups)


def test_a_pack_of_another_step_has_another_divisor():
    with open_scheduler([text_sample(3, index) for index in range(8)]) as scheduler:
        first, second = next(scheduler), next(scheduler)
        logits = torch.zeros(1, second[0].total_tokens, 128)
        with pytest.raises(ValueError, match="the pack is of step 1, its loss was asked of step 0"):
            first.loss(logits, second[0])
        with pytest.raises(ValueError, match="the pack is of step 0, it runs in step 1"):
            second.sync_on_last(torch.nn.Linear(1, 1), first[0])
        for batch in (second[0], second[0].to("cpu"), second[0].shard(0, 1)):
            assert second.loss(logits, batch) > 0
        alone = pack_samples([text_sample(3, 0)], adapter=TEXT)
        assert second.loss(logits[:, :3], alone) > 0  # of no step: packed by the user


def test_a_step_and_a_scheduler_say_what_they_are():
    with open_scheduler([text_sample(3, index) for index in range(12)]) as scheduler:
        assert repr(scheduler) == "<PackingScheduler: 'text', rank 0 of 1, before step 0>"
        step = [next(scheduler), next(scheduler)][-1]
        assert repr(step) == "<PackedStep 1: rank 0 of 1, 1 micro-batch, 4 of 4 samples, 12 of 12 tokens>"
        assert repr(scheduler) == "<PackingScheduler: 'text', rank 0 of 1, before step 2>"
    assert repr(scheduler) == "<PackingScheduler: 'text', rank 0 of 1, before step 2, closed>"

    def fn(rank, num_ranks):
        with open_scheduler([text_sample(60, f"{rank}-{index}") for index in range(2 + 2 * rank)]) as scheduler:
            return repr(next(scheduler))

    text = "<PackedStep 0: rank {} of 2, 2 micro-batches, 3 of 6 samples, 180 of 360 tokens>"
    assert run_ranks(fn, 2) == [text.format(rank) for rank in range(2)]
