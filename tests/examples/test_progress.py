"""What the demo counts per step, and what it makes of it at the end."""

import json

import msgspec
import pytest
from demo.evaluate import CHANCE
from demo.exactness import TOLERANCE, Exactness
from demo.figures import draw_loads, draw_loss
from demo.progress import StepRecord, Totals, padded_batch_tokens
from demo.report import summary, write_report
from PIL import Image

EXACT = Exactness(loss=1e-8, gradients=1e-7, num_samples=32)


def record(step: int, num_ranks: int = 2, **changes: object) -> StepRecord:
    """A plausible step, whose first rank brought most of the work."""
    loads = [100] * num_ranks
    figures = {
        "step": step,
        "loss": 8.0 / step,
        "seconds": 0.5,
        "tokens": 900,
        "padded_tokens": 900,
        "padded_batch_tokens": 1500,
        "imbalance_home": 1.5,
        "imbalance": 1.0,
        "efficiency": 0.9,
        "loads_home": [100 + 10 * (num_ranks - 1), *[90] * (num_ranks - 1)],
        "loads": loads,
        "num_microbatches": 2,
        "moved_bytes": 1_000_000,
        "shuffle_bytes": 4_000_000,
        "gap": 0.01,
    }
    return StepRecord(**(figures | changes))


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ([], 10, 0),
        ([7], 10, 7),
        ([2, 3, 4, 9], 12, 3 * 4 + 9),
        ([9, 1, 1], 12, 9 + 2),  # a long sample is not padded to
        ([1, 1, 9], 12, 2 + 9),
        ([5, 5, 5], 15, 15),
        ([20, 1], 12, 20 + 1),  # above the limit, it is a batch of its own
    ],
)
def test_padded_batches_hold_what_fits_in_order(lengths, max_tokens, expected):
    assert padded_batch_tokens(lengths, max_tokens) == expected


def test_totals_of_a_run():
    totals = Totals.of([record(1), record(2, tokens=600, padded_tokens=700, imbalance=1.1, imbalance_home=2.0)])
    assert totals.tokens == 1500
    assert totals.seconds == 1.0
    assert totals.imbalance_home == pytest.approx(1.75)
    assert totals.imbalance == pytest.approx(1.05)
    assert totals.padding_batches == pytest.approx(0.5)
    assert totals.padding_packs == pytest.approx(1 - 1500 / 1600)
    assert (totals.moved_bytes, totals.shuffle_bytes) == (2_000_000, 8_000_000)


def test_summary_names_every_figure():
    text = summary(Totals.of([record(1)]), EXACT, accuracy=0.8)
    for expected in ("80% of held-out", "chance is 10%", "1.500 without, 1.000 with", "40.0% in padded", "0.0% in packs"):
        assert expected in text
    for expected in ("1.0 MB, 25% of a full shuffle's 4.0 MB", "loss 1.0e-08, gradients 1.0e-07", "equal up to rounding"):
        assert expected in text


def test_summary_of_one_rank_that_never_moves_anything():
    assert "0.0 MB, 0% of" in summary(Totals.of([record(1, 1, moved_bytes=0, shuffle_bytes=0)]), EXACT, accuracy=0.1)


@pytest.mark.parametrize(
    ("loss", "gradients", "holds"), [(0.0, 0.0, True), (2 * TOLERANCE, 0.0, False), (0.0, 2 * TOLERANCE, False)]
)
def test_exactness_holds_only_if_both_do(loss, gradients, holds):
    exactness = Exactness(loss=loss, gradients=gradients, num_samples=2)
    assert exactness.holds is holds
    assert ("NOT EQUAL" in summary(Totals.of([record(1)]), exactness, accuracy=0.5)) is not holds


def test_nothing_that_is_not_a_number_counts_as_exact():
    assert not Exactness(loss=float("nan"), gradients=0.0, num_samples=2).holds
    assert not Exactness(loss=0.0, gradients=float("nan"), num_samples=2).holds


@pytest.mark.parametrize(("num_steps", "num_ranks"), [(1, 1), (40, 2), (5, 8)])
def test_pictures_of_any_size_of_run(tmp_path, num_steps, num_ranks):
    records = [record(step, num_ranks) for step in range(1, num_steps + 1)]
    draw_loss(records, 0.5, CHANCE, tmp_path / "loss.png")
    draw_loads(records, tmp_path / "loads.png")
    for name in ("loss.png", "loads.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width > 600 and len(image.convert("L").getcolors(256)) > 10


def test_report_leaves_its_files(tmp_path, capsys):
    write_report(tmp_path, [record(1), record(2)], EXACT, accuracy=0.75)
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["accuracy"] == 0.75 and figures["exactness"]["gradients"] == 1e-7
    assert figures.keys() >= set(msgspec.to_builtins(Totals.of([record(1)])))
    assert {file.name for file in tmp_path.iterdir()} == {"summary.json", "loss.png", "loads.png"}
    assert "Summary" in capsys.readouterr().out
