"""The run log behind Megatron-Core's data iterator."""

import gc

import pytest

from evenpack.scheduler import RunLog, SchedulerConfig, read_run
from evenpack.scheduler.telemetry.run_log import replay_differences

from .helpers import Samples, on_ranks, own_sample, place, wrap


def test_every_global_batch_is_recorded_also_where_their_size_changes(tmp_path):
    """Two replicas of two tensor-parallel ranks: one writer, one file, closed with the iterator; all steps replay."""

    def body():
        items = Samples([own_sample(4 + 7 * (n % 5) + place().dp, n) for n in range(40)])
        config = SchedulerConfig(max_tokens=64, samples_per_step=1)
        for count in (4, 4, 6, 6):
            wrap(items, count, settings=config, callbacks=[RunLog(tmp_path)])
        del items
        gc.collect()

    on_ranks(body, 4, tp=2)
    recorded = list(read_run(tmp_path))
    assert [len(step.table) for step in recorded] == [8, 8, 12, 12]
    assert [step.header.config.samples_per_step for step in recorded] == [4, 4, 6, 6]
    assert [replay_differences(step) for step in recorded] == [[]] * 4
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_called_is_refused_on_every_rank():
    def body():
        with pytest.raises(ValueError, match="a callback takes a step, 'runs/first' is no such function"):
            wrap(Samples([own_sample(4, 0)]), 1, callbacks=["runs/first"])

    on_ranks(body, 2, tp=2)
