"""Callbacks of the scheduler behind a `transformers.Trainer`."""

from evenpack.scheduler import RunLog, read_run

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
