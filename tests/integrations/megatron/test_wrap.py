"""`wrap_data_iterator`: who reads, what every rank gets, what it says in numbers."""

import gc
import io
import weakref

import msgspec
import pytest
import torch

from evenpack.core import EvenpackError, FieldMismatchError, MissingFieldError, OversizeSampleError
from evenpack.integrations.megatron import load_state, state_of, wrap_data_iterator
from evenpack.scheduler import SchedulerConfig

from .helpers import Samples, megatron_sample, on_ranks, own_sample, packs_of, place, settings, wrap

METADATA = {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "padding_mask", "num_spelled", "position_ids", "sample_ids"}
FIRST, LAST = {"tokens"}, {"labels", "loss_mask"}


def lengths_of(packs):
    return [[b - a for a, b in zip(pack["cu_seqlens"], pack["cu_seqlens"][1:], strict=False)] for pack in packs]


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "order"),
    [
        (2, {}, "tp-cp-ep-dp-pp"),
        (2, {"tp": 2}, "tp-cp-ep-dp-pp"),
        (2, {"cp": 2}, "tp-cp-ep-dp-pp"),
        (3, {"pp": 3}, "tp-cp-ep-dp-pp"),
        (8, {"tp": 2, "pp": 2}, "tp-cp-ep-dp-pp"),
        (8, {"tp": 2, "pp": 2}, "tp-cp-ep-pp-dp"),
        (8, {"cp": 2, "pp": 2}, "tp-cp-ep-dp-pp"),
    ],
)
def test_one_rank_reads_and_every_rank_gets_what_its_stage_needs(num_ranks, sizes, order):
    def body():
        here = place()
        items = Samples([own_sample(5 + 3 * here.dp + n, f"{here.dp}-{n}") for n in range(40)])
        seen = []
        for _ in range(3):
            iterator, count, total, squares = wrap(items, 6)
            seen.append((packs_of(iterator, count), total, squares))
        return vars(here), seen, items.taken

    results = on_ranks(body, num_ranks, order=order, **sizes)
    readers = {here["dp"]: seen for here, seen, _ in results if here["reads"]}
    stages = sizes.get("pp", 1)
    names: list[str] = []
    for here, seen, taken in results:
        assert (taken > 0) == here["reads"]
        wanted = METADATA | (FIRST if here["pp"] == 0 else set()) | (LAST if here["pp"] == stages - 1 else set())
        for (packs, total, squares), (own, own_total, own_squares) in zip(seen, readers[here["dp"]], strict=True):
            assert (total, squares) == (own_total, own_squares)
            for pack, reference in zip(packs, own, strict=True):
                assert set(pack) - {"cp_slicing", "token_axes", "global_loss_tokens", "loss_divisor"} == wanted
                assert all(pack[name] == reference[name] for name in set(pack) & set(reference))
                names += [name for name in pack["sample_ids"] if name is not None and here["reads"]]
    replicas = len(readers)
    assert sorted(names) == sorted(f"{dp}-{n}" for dp in range(replicas) for n in range(18))


def test_sums_are_exact_integers_of_real_lengths():
    def body():
        items = Samples([own_sample(n, n) for n in (17, 5, 3, 9)])
        config = settings(max_seqlen_per_dp_cp_rank=32)
        iterator, _, total, squares = wrap(
            items, 4, config, settings=SchedulerConfig(max_tokens=32, samples_per_step=1, align=8)
        )
        return total, squares, msgspec.to_builtins(iterator.facts)

    ((total, squares, facts),) = on_ranks(body, 1)
    assert (total, squares) == (34, 17**2 + 5**2 + 3**2 + 9**2)
    assert type(total) is int and type(squares) is int
    assert facts["padded_seqlen_sum"] == 24 + 8 + 8 + 16
    assert facts["padded_seqlen_squared_sum"] == 24**2 + 8**2 + 8**2 + 16**2
    assert facts["consumed_samples"] == 4


def test_the_number_of_next_calls_may_change_between_steps():
    """Batch ramp-up: what was prepared ahead has another size, and is read again, nothing lost or repeated."""
    counts = [2, 2, 3, 5, 5, 1]

    def body():
        here = place()
        items = Samples([own_sample(4 + (n % 7), f"{here.dp}-{n}") for n in range(30)])
        steps = []
        for count in counts:
            iterator, packs, _, _ = wrap(items, count)
            names = [name for pack in packs_of(iterator, packs) for name in pack["sample_ids"] if name is not None]
            steps.append((names, iterator.facts.consumed_samples))
        return steps

    results = on_ranks(body, 2)
    start = 0
    for index, count in enumerate(counts):
        names = sorted(name for steps in results for name in steps[index][0])
        assert names == sorted(f"{dp}-{n}" for dp in range(2) for n in range(start, start + count))
        start += count
        assert results[0][index][1] == 2 * start


@pytest.mark.parametrize("wrapped", [False, True])
def test_items_may_be_lists_and_packed_rows_and_replay_is_not_kept(wrapped):
    def body():
        from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

        get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
        row = {name: torch.cat([megatron_sample(3, 1)[name], megatron_sample(4, 2)[name]]) for name in ("tokens", "labels")}
        row |= {"loss_mask": torch.ones(7), "position_ids": torch.cat([torch.arange(3), torch.arange(4)])}
        row["cu_seqlens"] = torch.tensor([0, 3, 7], dtype=torch.int32)
        items = Samples([[megatron_sample(5, 0), megatron_sample(6, 3)], row, [], megatron_sample(2, 4)])
        source = RerunDataIterator(items) if wrapped else items
        iterator, count, total, _ = wrap(source, 4)
        packs = packs_of(iterator, count)
        iterator.rewind()
        assert packs_of(iterator, count) == packs
        assert not wrapped or source.saved_microbatches == []
        return sorted(length for lengths in lengths_of(packs) for length in lengths), total

    assert on_ranks(body, 1) == [([2, 3, 4, 5, 6], 20)]


def test_virtual_pipelines_get_one_iterator_per_chunk():
    def body():
        items = Samples([own_sample(5, n) for n in range(12)]) if place().reads else None
        config = settings(virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=2)
        iterators, count, _, _ = wrap_data_iterator([items, None], config, 6)
        return [packs_of(iterator, count) for iterator in iterators], count

    for chunks, count in on_ranks(body, 2, pp=2, vpp=2):
        assert len(chunks) == 2 and chunks[0] == chunks[1] and count % 2 == 0


def test_a_scheduler_lives_as_long_as_its_iterator():
    def body():
        items = Samples([own_sample(5, n) for n in range(12)])
        iterator, _, _, _ = wrap(items, 2)
        again, _, _, _ = wrap(items, 2)
        assert again.session is iterator.session and items.taken >= 4
        scheduler = weakref.ref(iterator.session.scheduler)
        del items, iterator, again
        gc.collect()
        return scheduler() is None

    assert on_ranks(body, 1) == [True]


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_resumed_run_sees_the_same_samples(lookahead):
    def body():
        here, config = place(), SchedulerConfig(max_tokens=64, samples_per_step=1, lookahead=lookahead)
        data = [own_sample(60 if n % 9 == 4 else 4 + n % 5, f"{here.dp}-{n}") for n in range(40)]

        def steps(items, count):
            found = []
            for _ in range(count):
                iterator, packs, _, _ = wrap(items, 4, settings=config)
                found.append([pack["sample_ids"] for pack in packs_of(iterator, packs)])
            return found

        first = Samples(data)
        steps(first, 3)
        file = io.BytesIO()
        torch.save({"iteration": 3, "data": state_of(first)}, file)
        file.seek(0)
        state = torch.load(file)["data"]
        expected = steps(first, 4)
        later = Samples(data[12:])
        load_state(later, state)
        return steps(later, 4) == expected, state["consumed_items"]

    assert on_ranks(body, 2) == [(True, 12)] * 2


def test_every_rank_learns_that_the_data_has_ended():
    def body():
        items = Samples([own_sample(5, n) for n in range(3)])
        wrap(items, 2)
        iterator, _, total, _ = wrap(items, 2)
        with pytest.raises(StopIteration):
            wrap(items, 2)
        return total, iterator.session and iterator.session.consumed_items

    # One of the readers has fewer items than the call asks for: what is left is spread.
    assert on_ranks(body, 4, tp=2) == [(10, 3), (10, None)] * 2


BAD = [
    (ValueError, "calculate_per_token_loss", {"calculate_per_token_loss": False}, {}),
    (ValueError, "max_seqlen_per_dp_cp_rank", {"max_seqlen_per_dp_cp_rank": None}, {}),
    (ValueError, "num_microbatches", {}, {"count": 0}),
    (ValueError, "only the first tensor-parallel rank", {}, {"everywhere": True}),
    (ValueError, "no data iterator", {}, {"nowhere": True}),
    (ValueError, "on_exhausted", {}, {"settings": SchedulerConfig(max_tokens=8, samples_per_step=1, on_exhausted="stop")}),
    (FieldMismatchError, "num_microbatches=3", {}, {"uneven": True}),
    (OversizeSampleError, "200", {}, {"length": 200}),
    *((MissingFieldError, f"needs '{name}'", {}, {"drop": name}) for name in ("tokens", "labels", "original_seq_len")),
    (EvenpackError, "str", {}, {"odd": "text"}),
]


@pytest.mark.parametrize(("kind", "text", "config", "how"), BAD)
def test_bad_input_is_one_error_on_every_rank(kind, text, config, how):
    def body():
        here = place()
        sample = megatron_sample(how.get("length", 7), 0)
        sample.pop(how.get("drop", ""), None)
        if here.dp == 0:
            sample = megatron_sample(7, 0)
        items = Samples([how.get("odd", sample)] * 8)
        present = (here.reads or "everywhere" in how) and "nowhere" not in how
        count = how.get("count", 3 if "uneven" in how and here.dp == 1 else 2)
        more = {"settings": how["settings"]} if "settings" in how else {}
        with pytest.raises(kind, match=text) as caught:
            wrap_data_iterator(items if present else None, settings(**config), count, **more)
        return type(caught.value).__name__, str(caught.value)

    results = on_ranks(body, 4, tp=2)
    assert len(set(results)) == 1, results
