"""`get_packed_batch`: what every stage and context-parallel rank gets, boundaries, loss."""

import numpy as np
import pytest
import torch

from evenpack.integrations.megatron import next_batch

from .helpers import Samples, megatron_sample, on_ranks, own_sample, own_samples, place, settings, taken, wrap

#: Lengths, context-parallel size, plan settings, real and padded boundaries, slots of the ranks.
ROWS = [
    ([3, 2], 1, {"pack_align": 8, "align": 1}, [0, 3, 5, 5], [0, 3, 5, 8], [list(range(8))]),
    ([5, 3], 2, {}, [0, 5, 8], [0, 8, 12], [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
    ([8, 4], 2, {}, [0, 8, 12], [0, 8, 12], [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
    ([1], 4, {}, [0, 1], [0, 8], [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ([7], 2, {}, [0, 7], [0, 8], [[0, 1, 6, 7], [2, 3, 4, 5]]),
]


@pytest.mark.parametrize(("lengths", "cp", "plan", "real", "padded", "slots"), ROWS)
def test_boundaries_and_shares(lengths, cp, plan, real, padded, slots):
    results = on_ranks(taken(own_samples(lengths), **plan), cp, cp=cp)
    whole = np.zeros(padded[-1], np.int64)
    for start, length in zip(padded, np.diff(real), strict=False):
        if length:
            whole[start : start + length] = own_sample(length, length)["input_ids"]
    for (row,), mine in zip(results, slots, strict=True):
        assert row["params"]["cu_seqlens_q"] == real and row["params"]["cu_seqlens_kv_padded"] == padded
        assert row["params"]["max_seqlen_q"] == max(np.diff(padded)) and row["params"]["qkv_format"] == "thd"
        assert row["same"] == (real == padded)
        assert row["tokens"] == [whole[mine].tolist()]
        assert row["attention_mask"] is None
        mask = np.asarray(row["padding_mask"][0])
        assert (np.asarray(row["labels"][0])[mask] == 0).all() and (np.asarray(row["loss_mask"][0])[mask] == 0).all()


def test_padded_boundaries_stand_in_for_real_ones_on_request():
    ((row,),) = on_ranks(taken(own_samples([3, 2]), valid="padded", align=4), 1)
    assert row["params"]["cu_seqlens_q"] == row["params"]["cu_seqlens_q_padded"] == [0, 4, 8] and row["same"]


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "first", "last"),
    [
        (1, {}, [(0, 0)], [(0, 0)]),
        (3, {"pp": 3}, [(0, 0)], [(2, 0)]),
        (2, {"pp": 2, "vpp": 2}, [(0, 0)], [(1, 1)]),
    ],
)
def test_stages_get_what_they_compute_on(num_ranks, sizes, first, last):
    for rank, chunks in enumerate(on_ranks(taken(own_samples([5, 3, 4])), num_ranks, **sizes)):
        for stage, row in enumerate(chunks):
            assert (row["tokens"] is not None) == (row["position_ids"] is not None) == ((rank, stage) in first)
            assert (row["labels"] is not None) == (row["loss_mask"] is not None) == ((rank, stage) in last)
            assert row["padding_mask"] and row["params"]["cu_seqlens_q"]


def test_stages_with_multi_token_prediction_get_everything():
    def body():
        items = Samples([own_sample(5, n) for n in range(2)])
        iterator, _, _, _ = wrap(items, 2, settings(mtp_num_layers=1, pipeline_model_parallel_layout=None))
        batch = next_batch(iterator, mtp_on_this_rank=place().pp == 1)
        return batch.tokens is not None, batch.labels is not None

    assert on_ranks(body, 2, pp=2) == [(True, False), (True, True)]


def test_alignment_follows_context_tensor_and_sequence_parallelism():
    def body():
        rows = []
        for parallel in (False, True):
            items = Samples([own_sample(100, n) for n in range(4)])
            config = settings(sequence_parallel=parallel, max_seqlen_per_dp_cp_rank=4096)
            iterator, _, _, _ = wrap(items, 4, config)
            rows.append(next(iterator)["cu_seqlens_padded"].tolist())
        return rows

    for rows in on_ranks(body, 4, tp=2, cp=2):
        assert rows == [[0, 100, 200, 300, 400], [0, 104, 208, 312, 416]]


def test_the_loss_is_divided_by_the_weights_of_the_whole_group():
    """Fractional weights: Megatron-Core divides by a count, which the scaled sum turns into the weighted mean."""

    def body():
        here = place()
        items = [own_sample(4 + n + 3 * here.dp, f"{here.dp}-{n}") for n in range(3)]
        for item in items:
            item["loss_weights"] = torch.linspace(0.0, 1.5, len(item["input_ids"]))
        iterator, count, _, _ = wrap(Samples(items), 3)
        sums, counts = 0.0, 0
        for _ in range(count):
            batch = next_batch(iterator)
            total, number, _ = batch.loss(batch.tokens.double())
            sums, counts = sums + float(total), counts + int(number)
        assert number.dtype == torch.int32
        return sums, counts, iterator.facts.global_loss_tokens

    results = on_ranks(body, 2)
    weighted = weights = 0.0
    for dp in range(2):
        for n in range(3):
            length = 4 + n + 3 * dp
            ids, weight = own_sample(length, f"{dp}-{n}")["input_ids"], torch.linspace(0.0, 1.5, length)
            weighted += float((ids[:-1] * weight[1:]).sum())
            weights += float(weight[1:].sum())
    assert sum(counts for _, counts, _ in results) == results[0][2]
    assert sum(sums for sums, _, _ in results) / results[0][2] == pytest.approx(weighted / weights, rel=1e-6)


def test_a_batch_must_come_from_the_wrapped_iterator():
    def body():
        with pytest.raises(ValueError, match="wrap_data_iterator"):
            next_batch(iter([megatron_sample(3, 0)]))
        return True

    assert on_ranks(body, 1) == [True]
