"""Callbacks of the scheduler behind a `transformers.Trainer`."""

import pytest

from evenpack.integrations.metrics import TensorBoardMetrics
from evenpack.scheduler import RunLog, read_run
from evenpack.scheduler.telemetry.run_log import replay_differences

from ..trainer.tiny import arguments, model_of, packed_trainer, samples


def test_a_trainer_records_its_training_and_not_its_evaluation(tmp_path):
    """Three steps of 3 samples, an evaluation of 8 others between: the log holds the steps alone, and is closed behind them."""
    trainer, _ = packed_trainer(
        model_of(), arguments(tmp_path / "out", max_steps=3, eval_strategy="steps", eval_steps=2),
        train_dataset=samples(9), eval_dataset=samples(8), packing_callbacks=[RunLog(tmp_path / "run")],
    )  # fmt: skip
    trainer.train()
    recorded = list(read_run(tmp_path / "run"))
    assert [len(step.table) for step in recorded] == [3, 3, 3]
    lines = [line for line in trainer.state.log_history if "imbalance" in line and "loss" in line]
    assert [round(step.stats.padding_share, 4) for step in recorded] == [line["padding_share"] for line in lines]


def test_a_second_training_goes_on_with_the_callbacks(tmp_path):
    """Two steps, then three from their checkpoint, then one from the beginning: in the run log, and in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = [RunLog(tmp_path / "run"), TensorBoardMetrics(tmp_path / "board")]
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer, _ = packed_trainer(
        model_of(), arguments(tmp_path / "out", max_steps=2, **settings), train_dataset=samples(9), packing_callbacks=told
    )
    trainer.train()
    trainer.args.max_steps = 5
    trainer.train(resume_from_checkpoint=True)
    recorded = list(read_run(tmp_path / "run"))
    assert [step.stats.step for step in recorded] == [0, 1, 2, 3, 4]
    assert not any(map(replay_differences, recorded))
    points = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("evenpack/imbalance")
    assert [point.step for point in points] == [0, 1, 2, 3, 4]
    trainer.args.max_steps = 1
    with pytest.warns(RuntimeWarning, match="already holds a run; reading it returns only the new one"):
        trainer.train()
    assert [step.stats.step for step in read_run(tmp_path / "run")] == [0]
