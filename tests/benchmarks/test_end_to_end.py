"""Pure parts of the end-to-end benchmark: padded batches, their loss, and the verdicts."""

import pytest
import torch

from benchmarks.end_to_end.padded import PaddedStep, collate, pictures_last, split
from benchmarks.end_to_end.report import lines, loss_difference, verdicts
from benchmarks.end_to_end.training import Outcome


@pytest.mark.parametrize(
    ("lengths", "capacity", "by_length", "expected"),
    [
        ([5, 5, 5], 10, False, [[0, 1], [2]]),
        ([2, 10, 2], 10, False, [[0], [1], [2]]),  # a long sample makes the short ones beside it too wide
        ([2, 10, 2], 10, True, [[1], [0, 2]]),
        ([3, 4], 8, False, [[0, 1]]),
        ([3, 4], 7, False, [[0], [1]]),  # 2 rows of 4, not 3 + 4
    ],
)
def test_padded_batches_stay_within_the_capacity(lengths, capacity, by_length, expected):
    assert split(lengths, capacity, by_length) == expected


def test_too_long_for_any_batch():
    with pytest.raises(ValueError, match="11 tokens does not fit 10"):
        split([3, 11], 10, False)


def test_the_last_batch_runs_the_tower():
    assert pictures_last([[0], [1, 2], [3]], [False, False, True, False]) == [[0], [3], [1, 2]]
    with pytest.raises(ValueError, match="none of the 2 samples"):
        pictures_last([[0], [1]], [False, False])


def test_shares_of_padded_batches_add_up_to_the_mean_over_all_targets():
    torch.manual_seed(0)
    ids = [torch.arange(1, 5), torch.arange(1, 8), torch.arange(1, 3)]
    samples = [{"input_ids": each, "labels": each.clone(), "mm_token_type_ids": each * 0} for each in ids]
    samples[1]["labels"][:3] = -100
    table = torch.randn(9, 9, dtype=torch.float64)
    targets = sum(int((each["labels"][1:] != -100).sum()) for each in samples)
    step = PaddedStep(samples, split([4, 7, 2], 14, False), float(targets), num_ranks=2)
    total = sum(
        step.loss(table[batch["input_ids"]], batch["labels"])
        for batch in (collate([samples[row] for row in rows]) for rows in step.batches)
    )
    every = [
        torch.nn.functional.cross_entropy(table[each["input_ids"]][:-1].float(), each["labels"][1:], reduction="sum")
        for each in samples
    ]
    assert step.computed_tokens == 14 + 2
    torch.testing.assert_close(total, 2 * torch.stack(every).sum() / targets)


def outcome(seconds, losses=(1.0, 0.5)):
    parts = {"tokens": 100, "computed": 120, "num_microbatches": 4, "peak_bytes": 10**6}
    return Outcome(seconds=seconds, cpu_seconds=seconds, losses=list(losses), **parts)


@pytest.mark.parametrize(
    ("padded", "packed", "ours", "marks"),
    [
        ([2.0, 2.2], [1.0, 1.1], [1.0, 1.0], ["pass", "pass", "pass"]),
        ([1.2, 1.2], [1.0, 1.0], [1.0, 1.0], ["MISS", "pass", "pass"]),
        ([2.0, 2.0], [0.9, 0.9], [1.0, 1.0], ["pass", "MISS", "pass"]),
    ],
)
def test_verdicts(padded, packed, ours, marks):
    rounds = {"a": [outcome(t) for t in padded], "b": [outcome(t) for t in packed], "e": [outcome(t) for t in ours]}
    assert [line[:4] for line in verdicts(rounds)] == marks
    assert any("padded batches, in order" in line for line in lines(rounds, 2))


def test_losses_of_every_step_are_compared():
    rounds = {"a": [outcome(1.0), outcome(1.0)], "e": [outcome(1.0), outcome(1.0, (1.0, 0.6))]}
    assert loss_difference(rounds) == pytest.approx(0.1)
    assert verdicts(rounds)[-1].startswith("MISS")
