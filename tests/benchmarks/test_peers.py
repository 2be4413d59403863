"""Pure parts of the comparison with released planners."""

import numpy as np
import pytest

from benchmarks.peers.adapters import dealt
from benchmarks.peers.report import agreement, plan_of, row_of, same_packs
from benchmarks.workloads import Workload
from evenpack.scheduler.plan import PlanConfig, SampleTable

TABLE = SampleTable.from_lengths([6, 4, 3, 5], home=[0, 0, 1, 1])
WORKLOAD = Workload(name="four", capacity=10, table=TABLE)
CONFIG = PlanConfig(max_tokens=10)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ([[0, 1], [2, 3]], [[3, 2], [1, 0]], "equal, sample by sample"),
        ([[0], [1, 2]], [[1], [0, 2]], "equal up to samples of the same value"),
        ([[3], [0, 2]], [[0, 1], [2]], "DIFFERENT: 2 and 2 parts, largest sums 7 and 10, +42.8571%"),
        ([[3], [4]], [[0, 2], [4]], "equal sums"),
    ],
)
def test_agreement(theirs, ours, said):
    assert same_packs(theirs, ours, [5, 5, 2, 7, 1]) == said


def test_a_peer_that_loses_samples_is_no_comparison():
    with pytest.raises(ValueError, match="hold 3 samples, 3 of them once, of 4"):
        plan_of(WORKLOAD, [[[0, 1]], [[2]]], CONFIG)
    with pytest.raises(ValueError, match="hold 5 samples, 4 of them once, of 4"):
        plan_of(WORKLOAD, [[[0, 1]], [[2, 3, 0]]], CONFIG)


def test_row_counts_what_a_capacity_forbids():
    row = row_of("all at one rank", "real", plan_of(WORKLOAD, [[[0, 1, 2, 3]], [[]]], CONFIG), 10, 0.001)
    assert (row.num_packs, row.num_microbatches, row.over_capacity, row.imbalance) == (1, 1, 1, 2.0)
    assert row.over_bound == pytest.approx(2.0)


def test_next_fit_is_compared_with_ours():
    assert dealt([[0], [1], [2]], 2) == [[[0], [2]], [[1]]]
    assert agreement("swift-in-order", dealt([[0, 1], [2, 3]], 2), WORKLOAD) == "equal, sample by sample"
    assert agreement("swift-in-order", dealt([[0], [1, 2], [3]], 2), WORKLOAD).startswith("DIFFERENT")
    assert np.asarray(TABLE.padded).tolist() == [6, 4, 3, 5]
