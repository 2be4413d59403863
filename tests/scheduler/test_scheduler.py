"""The iterator: every sample once, equal steps on all ranks, policies, scopes and budgets."""

import threading
import zlib
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from evenpack.core import EvenpackError, Field, OversizeSampleError
from evenpack.core.fields import dtype_of
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
from evenpack.scheduler import prefetch as prefetch_module
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, VISION, drain, flat, image_sample, mixed_source, names_of, open_scheduler, random_source, text_sample


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "exactly one of samples_per_step and tokens_per_step, got neither"),
        ({"samples_per_step": 1, "defer": 2}, "defer is gone: lookahead=8 keeps 8 steps in view"),
        ({"samples_per_step": 1, "lookahead": 129}, "lookahead must be at most 128, got 129"),
        ({"samples_per_step": 1, "lookahead": 0}, "lookahead must be an integer of at least 1, got 0"),
        ({"samples_per_step": 1, "step_tokens_tolerance": 1.5}, "step_tokens_tolerance must be a number from 0.0 to 1.0"),
        ({"samples_per_step": 1, "step_samples_tolerance": -1}, "step_samples_tolerance must be a number from 0.0 to 1.0"),
        ({"scope": "microbatch", "num_microbatches": 65536}, "num_microbatches must be at most 65535, got 65536"),
        ({"samples_per_step": 1, "tokens_per_step": 5}, "exactly one"),
        ({"samples_per_step": 0}, "samples_per_step must be an integer of at least 1, got 0"),
        ({"samples_per_step": 2.0}, "got 2.0"),
        ({"samples_per_step": 1, "prefetch": -1}, "prefetch"),
        ({"samples_per_step": 1, "timeout": float("nan")}, "timeout must be a number"),
        ({"samples_per_step": 1, "scope": "world"}, "scope must be one of group, rank, microbatch, got 'world'"),
        ({"samples_per_step": 1, "pixel_dtype": "int8"}, "pixel_dtype"),
        ({"scope": "microbatch"}, "needs num_microbatches"),
        ({"scope": "microbatch", "num_microbatches": 2, "samples_per_step": 1}, "leave out samples_per_step"),
        ({"samples_per_step": 1, "scope": "rank", "lookahead": 2}, "lookahead=2 needs scope='group', got scope='rank'"),
        ({"tokens_per_step": 9, "lookahead": 2}, "lookahead=2 needs samples_per_step, got tokens_per_step=9"),
        (
            {"samples_per_step": 1, "num_microbatches": 2, "lookahead": 2},
            "lookahead=2 needs num_microbatches=None, got num_microbatches=2",
        ),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, text):
    with pytest.raises(ValueError, match=text):
        SchedulerConfig(max_tokens=8, **settings)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_sample_once_and_equal_steps(num_ranks, sync, prefetch):
    """Sources of different lengths, one empty (D1, D2): all ranks take the same steps, every sample is computed once."""

    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 7 * rank), sync=sync, prefetch=prefetch) as scheduler:
            return [(len(step), names_of(step), step.plan.digest) for step in scheduler]

    outcomes = run_ranks(fn, num_ranks)
    assert len({tuple((count, digest) for count, _, digest in steps) for steps in outcomes}) == 1
    names = [name for steps in outcomes for _, packs, _ in steps for name in flat(packs)]
    assert sorted(names) == sorted(f"{rank}-{index}" for rank in range(num_ranks) for index in range(7 * rank))


def test_payload_follows_its_sample():
    """Images of ranks with none, one or two in a sample (D6) arrive with the sample that brought them."""
    sources = {rank: mixed_source(rank, 9) for rank in range(3)}
    by_name = {sample["sample_id"]: sample for source in sources.values() for sample in source}

    def fn(rank, num_ranks):
        moved = 0
        with open_scheduler(sources[rank], adapter=VISION, samples_per_step=3) as scheduler:
            for step in scheduler:
                moved += step.plan.moved_bytes
                for batch in step:
                    patch = item = 0
                    for segment, name in enumerate(batch.sample_ids):
                        start = int(batch.cu_seqlens_q_padded[segment])
                        if name is None:
                            continue
                        sample = by_name[name]
                        ids = sample["input_ids"]
                        assert torch.equal(batch.input_ids[0, start : start + len(ids)], ids)
                        if "pixel_values" in sample:
                            size, items = len(sample["pixel_values"]), len(sample["image_grid_thw"])
                            assert torch.equal(batch.pixel_values[patch : patch + size], sample["pixel_values"])
                            assert torch.equal(batch.image_grid_thw[item : item + items], sample["image_grid_thw"])
                            patch, item = patch + size, item + items
        return moved

    assert min(run_ranks(fn, 3)) > 0


def test_fields_of_any_rank_type_and_default_travel():
    """D4, D5: tensors of any rank, strings, a field on one sample only, an int16 field."""
    fields = [
        Field(name="advantages", kind="token", dtype="float32", default=0.5, pad=-1.0),
        Field(name="caption", kind="sample", dtype="text", default="none"),
        Field(name="table", kind="sample", dtype="int16", shape=(None, 1, 8)),
        Field(name="scores", kind="token", dtype="float64", shape=(2,), default=0.0),
    ]

    def source(rank):
        plain = [text_sample(40, f"{rank}-plain")]
        rich = text_sample(
            8, f"{rank}-rich", advantages=torch.arange(8.0), caption=f"from {rank}",
            scores=torch.ones(8, 2, dtype=torch.float64), table=torch.full((3, 1, 8), rank, dtype=torch.int16),
        )  # fmt: skip
        return [*plain * (rank == 0), rich, text_sample(8, f"{rank}-other")]

    def fn(rank, num_ranks):
        with open_scheduler(source(rank), fields=fields, movement="free") as scheduler:
            found = {}
            for step in scheduler:
                for batch in step:
                    for segment, name in enumerate(batch.sample_ids):
                        start, end = batch.cu_seqlens_q_padded[segment : segment + 2].tolist()
                        found[name] = (
                            batch.advantages[0, start:end].tolist(), batch.caption[segment], batch.table[segment],
                            batch.scores[0, start:end].sum().item(),
                        )  # fmt: skip
            return found

    found = {name: value for outcome in run_ranks(fn, 2) for name, value in outcome.items() if name is not None}
    assert len(found) == 5
    for rank in range(2):
        advantages, caption, table, scores = found[f"{rank}-rich"]
        assert (advantages, caption, scores) == (list(map(float, range(8))), f"from {rank}", 16.0)
        assert table.dtype == torch.int16 and (table == rank).all() and table.shape == (3, 1, 8)
        assert found[f"{rank}-other"] == ([0.5] * 8, "none", None, 0.0)


@pytest.mark.parametrize(
    ("policy", "names", "dropped"),
    [("drop", ["ok", "fits"], 1), ("truncate", ["ok", "long", "fits"], 0)],
)
def test_oversize_policies_are_counted(policy, names, dropped):
    source = [text_sample(5, "ok"), text_sample(12, "long"), text_sample(5, "fits")]
    with open_scheduler(source, max_tokens=10, oversize=policy) as scheduler:
        step = next(scheduler)
        assert sorted(flat(names_of(step))) == sorted(names)
        assert (step.stats.num_dropped, step.stats.num_truncated) == (dropped, int(policy == "truncate"))
        assert step.stats.tokens == sum(min(10, len(sample["input_ids"])) for sample in source if sample["sample_id"] in names)


def test_oversize_error_names_rank_sample_value_and_limit():
    def fn(rank, num_ranks):
        source = [text_sample(12, "big")] if rank == 1 else [text_sample(3, "small")]
        with pytest.raises(
            OversizeSampleError, match=r"rank 1, sample 'big': 12 tokens \(12 padded\) exceed the capacity of 10"
        ):
            drain(open_scheduler(source, max_tokens=10))

    run_ranks(fn, 2)


def test_leftover_samples_are_counted():
    """P15: three samples of 9 in two packs of 10: one is left over, and counted."""

    def fn(rank, num_ranks):
        source = [text_sample(9, f"{rank}-{index}") for index in range(2 - rank)]
        with open_scheduler(source, max_tokens=10, num_microbatches=1, oversize="drop") as scheduler:
            stats = next(scheduler).stats
            return stats.tokens, stats.padded_tokens, stats.num_dropped, len(scheduler)

    assert run_ranks(fn, 2) == [(18, 18, 1, 1)] * 2


def test_stop_ends_with_the_last_full_step():
    def fn(rank, num_ranks):
        return drain(open_scheduler(random_source(rank, 9 + 4 * rank), on_exhausted="stop"))

    outcomes = run_ranks(fn, 2)
    assert [len(steps) for steps in outcomes] == [2, 2]
    assert len(list(flat(outcomes))) == 16


def test_each_epoch_reads_the_source_anew_and_a_broken_loop_goes_on():
    with open_scheduler(random_source(0, 10)) as scheduler:
        first = [names_of(step) for step in scheduler]
        assert len(scheduler) == len(first) == 3
        again = []
        for step in scheduler:
            again.append(names_of(step))
            if len(again) == 1:
                break
        again += [names_of(step) for step in scheduler]
        assert again == first
        with pytest.raises(StopIteration):
            next(scheduler)  # only a new loop begins a new epoch
        assert names_of(next(iter(scheduler))) == first[0]
        with pytest.raises(TypeError, match=r"no len|object of type"):
            len(open_scheduler(iter([])))


def reference_budget(sources, budget):
    """Return the steps of a token budget, one sample at a time in (round, rank) order."""
    waiting = [list(source) for source in sources]
    steps = []
    while any(waiting):
        taken, used, position = [], 0, [0] * len(waiting)
        while True:
            best = min(((position[r], r) for r in range(len(waiting)) if position[r] < len(waiting[r])), default=None)
            if best is None or used + waiting[best[1]][best[0]][0] > budget:
                break
            length, name = waiting[best[1]][best[0]]
            used, taken = used + length, [*taken, name]
            position[best[1]] += 1
        waiting = [source[position[rank] :] for rank, source in enumerate(waiting)]
        steps.append(sorted(taken))
    return steps


@pytest.mark.parametrize("budget", [100, 173, 400])
@pytest.mark.parametrize("counts", [(12, 12), (3, 30, 0)])
def test_token_budget_takes_the_longest_prefix(budget, counts):
    def fn(rank, num_ranks):
        return drain(open_scheduler(random_source(rank, counts[rank]), tokens_per_step=budget))

    outcomes = run_ranks(fn, len(counts))
    got = [sorted(flat([steps[index] for steps in outcomes])) for index in range(len(outcomes[0]))]
    sources = [
        [(len(sample["input_ids"]), sample["sample_id"]) for sample in random_source(rank, count)]
        for rank, count in enumerate(counts)
    ]
    assert got == reference_budget(sources, budget)


def test_what_is_dropped_is_counted_however_often_ranks_look_ahead():
    def fn(rank, num_ranks):
        source = [text_sample(200 if index % 5 == 1 else 2, f"{rank}-{index}") for index in range(50 if rank else 5)]
        with open_scheduler(source, tokens_per_step=20, max_tokens=100, oversize="drop") as scheduler:
            return sum(step.stats.num_dropped for step in scheduler)

    assert set(run_ranks(fn, 2)) == {11}


def test_a_sample_above_the_token_budget_is_an_error():
    with pytest.raises(EvenpackError, match="tokens_per_step"):
        drain(open_scheduler([text_sample(60, "big")], tokens_per_step=50))


def test_rank_scope_keeps_every_sample_at_home():
    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 12), scope="rank") as scheduler:
            return [(len(step), step.plan.moved_bytes, names_of(step)) for step in scheduler]

    outcomes = run_ranks(fn, 3)
    for rank, steps in enumerate(outcomes):
        assert all(name.startswith(f"{rank}-") for _, moved, packs in steps for name in flat(packs) if moved == 0)
        assert [count for count, _, _ in steps] == [count for count, _, _ in outcomes[0]]
        assert all(moved == 0 for _, moved, _ in steps)


def test_microbatch_scope_takes_lists_as_they_come():
    lists = [["a", "b"], ["c"], ["d", "e", "f"], ["g"], ["h"]]

    def fn(rank, num_ranks):
        source = [[text_sample(5, f"{rank}{name}") for name in names] for names in lists]
        return drain(open_scheduler(source, scope="microbatch", num_microbatches=2, max_tokens=16))

    for rank, steps in enumerate(run_ranks(fn, 2)):
        packs = [[f"{rank}{name}" for name in names] for names in lists]
        assert steps == [packs[0:2], packs[2:4], [packs[4], []]]


def test_a_list_above_the_capacity_is_an_error_on_every_rank():
    def fn(rank, num_ranks):
        source = [[text_sample(5, index) for index in range(2 + 2 * rank)]]
        with pytest.raises(OversizeSampleError, match="rank 1, list 0 of the step: 20 padded tokens exceed the capacity of 16"):
            drain(open_scheduler(source, scope="microbatch", num_microbatches=1, max_tokens=16))

    run_ranks(fn, 2)


def result_of(name):
    """Return a result that says which sample it is of."""
    return torch.tensor([zlib.crc32(name.encode()) % 1000, len(name)], dtype=torch.int16)


def test_results_return_to_the_rank_that_brought_the_sample():
    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 12), prefetch=2) as scheduler:
            for step in scheduler:
                mine = [[result_of(name) for name in names] for names in names_of(step)]
                yield step, step.return_home(mine)

    def body(rank, num_ranks):
        expected = iter(sample["sample_id"] for sample in random_source(rank, 12))
        for _, values in fn(rank, num_ranks):
            for value in values:
                name = next(expected)
                assert torch.equal(value, result_of(name))
        assert next(expected, None) is None

    run_ranks(body, 3)
    run_ranks(body, 2, backend="gloo")


def test_values_that_do_not_match_the_packs_are_refused():
    with open_scheduler(random_source(0, 4)) as scheduler, pytest.raises(ValueError, match="one value per sample"):
        next(scheduler).return_home([])


def test_sums_of_lengths_are_exact_and_real():
    """P17: 17 real tokens are 24 padded ones; both are kept."""
    with open_scheduler([text_sample(17, "x")], align=8, samples_per_step=1) as scheduler:
        step = next(scheduler)
        assert (step.seqlen_sum, step.seqlen_squared_sum) == (17, 289)
        assert (step.padded_seqlen_sum, step.padded_seqlen_squared_sum) == (24, 576)


def test_dummy_pack_has_a_token_and_no_loss():
    """P6: one sample on two ranks: the other rank gets a pack with one real token and no target."""

    def fn(rank, num_ranks):
        with open_scheduler([text_sample(10, "x")] if rank == 0 else [], max_tokens=10) as scheduler:
            step = next(scheduler)
            (batch,) = step
            assert step.global_loss_tokens == 9 and step.loss_divisor == 9.0
            return batch.loss_tokens, int((~batch.padding_mask).sum()), batch.num_samples

    assert sorted(run_ranks(fn, 2)) == [(0, 1, 0), (9, 10, 1)]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_dummies_are_padding_in_fields_of_the_user(dtype):
    """A required field of any dtype and shape, in a step with a dummy of text and one of an image."""
    more = [
        Field(name="flags", kind="token", dtype=dtype, required=True, pad=1),
        Field(name="scores", kind="token", dtype="float32", shape=(3,), axis=1, required=True),
        Field(name="reward", kind="sample", dtype="float32", required=True),
    ]

    def fn(rank, num_ranks):
        raw = image_sample([(1, 4, 4)], "x")
        length = len(raw["input_ids"])
        raw |= {
            "flags": torch.zeros(length, dtype=dtype_of(dtype)),
            "scores": torch.ones(3, length),
            "reward": torch.tensor(1.0),
        }
        adapter = msgspec.structs.replace(VISION, trained_modalities=("image",))
        with open_scheduler([raw] if rank == 0 else [], adapter=adapter, fields=more) as scheduler:
            (batch,) = next(scheduler)
            fill = set() if batch.num_samples else set(batch.flags.flatten().tolist())
            return batch.num_samples, batch.flags.dtype, tuple(batch.scores.shape[:2]), fill, "pixel_values" in batch.media

    dummy, sample = sorted(run_ranks(fn, 2), key=str)
    assert dummy == (0, dtype_of(dtype), (3, 1), {1}, True) and sample == (1, dtype_of(dtype), (3, 1), set(), True)


def test_pixels_are_cast_on_their_own_rank():
    with open_scheduler(
        [image_sample([(1, 4, 4)], "x")], adapter=VISION, pixel_dtype="bfloat16", samples_per_step=1
    ) as scheduler:
        (batch,) = next(scheduler)
        assert batch.pixel_values.dtype == torch.bfloat16


def test_a_loader_with_a_collate_fn_gives_lists():
    loader = torch.utils.data.DataLoader(random_source(0, 10), batch_size=3, collate_fn=list)
    with open_scheduler(loader) as scheduler:
        assert len(scheduler) == 3
        assert len(list(flat(drain(scheduler)))) == 10


def test_64_simulated_ranks():
    def fn(rank, num_ranks):
        return drain(open_scheduler(random_source(rank, 64), samples_per_step=64, max_tokens=512))

    outcomes = run_ranks(fn, 64, timeout=120)
    assert len(set(flat(outcomes))) == len(list(flat(outcomes))) == 64 * 64


def test_groups_without_a_job_are_one_rank():
    groups = ProcessGroups.from_world()
    assert (groups.rank, groups.num_ranks, groups.cp_size) == (0, 1, 1)
    config = SchedulerConfig(max_tokens=8, samples_per_step=1)
    with PackingScheduler([{"input_ids": [1, 2]}], config=config, adapter=TEXT) as scheduler:
        assert np.array_equal(next(scheduler)[0].input_ids, [[1, 2]])


def test_lists_that_are_empty_or_dropped_do_not_end_the_epoch():
    source = [[text_sample(5, 0)], [text_sample(500, 1)], [], [text_sample(5, 2)], [text_sample(5, 3)]]
    settings = {"scope": "microbatch", "num_microbatches": 1, "oversize": "drop", "max_tokens": 64}
    with open_scheduler(source, **settings) as scheduler:
        assert [names_of(step) for step in scheduler] == [[[0]], [[2]], [[3]]]
        assert scheduler.num_dropped == 1


def test_stop_keeps_every_full_step():
    """Of a token budget too, although ranks read ahead; and of a window, in which heavy samples wait."""
    source = [text_sample(5, index) for index in range(5)]
    with open_scheduler(source, tokens_per_step=10, on_exhausted="stop") as scheduler:
        assert [sorted(flat(names_of(step))) for step in scheduler] == [[0, 1], [2, 3]]

    def fn(rank, num_ranks):
        samples = [text_sample(60 if (rank, index) == (0, 1) else 5, f"{rank}-{index}") for index in range(7)]
        with open_scheduler(samples, samples_per_step=2, lookahead=9, on_exhausted="stop", max_tokens=64) as scheduler:
            return [names_of(step) for step in scheduler]

    names = list(flat(run_ranks(fn, 2)))
    assert sorted(names) == sorted(f"{rank}-{index}" for rank in range(2) for index in range(6))


def test_drops_behind_the_last_step_are_counted():
    with open_scheduler([text_sample(5, 0), text_sample(500, 1)], samples_per_step=1, oversize="drop") as scheduler:
        assert [step.stats.num_dropped for step in scheduler] == [0]
        assert scheduler.num_dropped == 1


@pytest.mark.parametrize("prefetch", [1, 2])
def test_an_interrupt_while_waiting_loses_nothing(prefetch, monkeypatch):
    """Ctrl-C while the loop waits for a step, whose source waits too: the same step comes again."""
    go_on = threading.Event()

    def slow():
        for index in range(24):
            assert index < 12 or go_on.wait(60)
            yield text_sample(5, index)

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            if len(got) == 3 and not go_on.is_set():
                go_on.set()
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(prefetch_module, "threading", SimpleNamespace(**vars(threading) | {"Event": Interrupted}))
    got = []
    with open_scheduler(slow(), prefetch=prefetch) as scheduler:
        for _ in range(3):
            got.append(names_of(next(scheduler)))
        with pytest.raises(KeyboardInterrupt):
            next(scheduler)
        got += [names_of(step) for step in scheduler]
    assert [sorted(flat(names)) for names in got] == [list(range(start, start + 4)) for start in range(0, 24, 4)]


def test_an_interrupt_inside_a_step_is_final():
    """Without prefetch, what was read for the step is gone: the scheduler must not go on as if nothing had happened."""

    def interrupted():
        yield from (text_sample(5, index) for index in range(6))
        raise KeyboardInterrupt

    with open_scheduler(interrupted(), prefetch=0) as scheduler:
        next(scheduler)
        with pytest.raises(KeyboardInterrupt):
            next(scheduler)
        with pytest.raises(RuntimeError, match="interrupted inside a step"):
            next(scheduler)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda data: torch.utils.data.DataLoader(data, batch_size=None), 3),
        (lambda data: torch.utils.data.DataLoader(data, batch_size=4, collate_fn=list), 3),
        (lambda data: torch.utils.data.DataLoader(data, batch_size=4, collate_fn=list, drop_last=True), 2),
        (
            lambda data: torch.utils.data.DataLoader(
                data, collate_fn=list, batch_sampler=torch.utils.data.BatchSampler(range(10), 5, False)
            ),
            3,
        ),
    ],
)
def test_length_counts_samples_not_batches(make, expected):
    with open_scheduler(make(random_source(0, 10))) as scheduler:
        assert len(scheduler) == expected


def test_samples_come_home_with_their_names():
    source = [text_sample(5, "a"), text_sample(500, "b"), text_sample(6, "c")]
    with open_scheduler(source, samples_per_step=3, oversize="drop") as scheduler:
        step = next(scheduler)
        values = step.return_home([[torch.tensor(len(name)) for name in names] for names in names_of(step)])
        assert step.home_ids == ["a", "c"] and len(values) == 2


def test_wrong_results_on_one_rank_are_an_error_on_every_rank():
    from evenpack.core import PeerFailedError

    def fn(rank, num_ranks):
        with open_scheduler(random_source(rank, 4)) as scheduler:
            step = next(scheduler)
            values = [[] for _ in step] if rank == 0 else [[torch.zeros(1) for _ in names] for names in names_of(step)]
            with pytest.raises(ValueError if rank == 0 else PeerFailedError):
                step.return_home(values)

    run_ranks(fn, 2)
