"""`evenpack report` on runs of simulated ranks."""

import json
import os
import re
import sqlite3
import subprocess
import sys

import msgspec
import pytest

from evenpack.cli.main import run
from evenpack.cli.report.pictures import as_page
from evenpack.cli.report.reading import read_report
from evenpack.cli.report.result import written
from evenpack.scheduler import Summary
from evenpack.scheduler.telemetry.run_log.store import FILE

from ..scheduler.telemetry.runs import record, record_ramp, rewrite


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same samples, and the figures of their steps."""
    folder = tmp_path_factory.mktemp("runs")
    first = record(folder / "first", images=True, sync="microbatch")
    second = record(folder / "second", images=True, sync="microbatch", movement="free", max_tokens=256)
    return folder, [[stats for stats, _, _ in ran] for ran in (first, second)]


def report(capsys, *arguments):
    code = run(["report", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_json_holds_the_figures_of_the_run(runs, capsys):
    folder, stats = runs
    code, out, err = report(capsys, folder / "first", "--json")
    [found] = json.loads(out)["runs"]
    assert (code, err) == (0, "")
    assert found["summary"] == Summary.of(stats[0]).as_dict()
    assert (found["first_step"], found["last_step"], found["not_recorded"]) == (0, len(stats[0]) - 1, 0)
    assert found["settings"]["num_ranks"] == 3 and found["settings"]["settings"]["sync"] == "microbatch"
    assert found["bytes_per_sample"] < 400  # twelve samples a step: mostly the figures of the step


def test_text_shows_every_figure(runs, capsys):
    folder, stats = runs
    code, out, _ = report(capsys, folder / "first")
    summary = Summary.of(stats[0])
    assert code == 0
    for label, value in [
        ("samples", f"{summary.samples:,}"),
        ("imbalance", f"{summary.imbalance:.3f}"),
        ("had samples stayed at home", f"{summary.imbalance_home:.3f}"),
        ("tokens/s", f"{summary.tokens_per_second:,.0f}"),
        ("share, first steps of epochs aside", written(summary.exposed_share, "share")),
    ]:
        assert re.search(rf"^ *{label} +{re.escape(value)}$", out, re.MULTILINE), (label, value, out)


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("more", [[], pytest.param(["--json"], marks=pytest.mark.full)])
def test_a_reader_that_goes_away_is_no_error(more, buffered, runs):
    """`evenpack report run | head`: the pipe is closed before anything is written."""
    command = [sys.executable, "-m", "evenpack", "report", str(runs[0] / "first"), *more]
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=120, env=environment)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_two_runs_are_compared(runs, capsys):
    folder, stats = runs
    _, out, _ = report(capsys, folder / "first", folder / "second", "--json")
    change = json.loads(out)["change"]
    first, second = map(Summary.of, stats)
    assert change["moved_bytes"] == pytest.approx(second.moved_bytes / first.moved_bytes - 1)
    assert change["bubble"] == pytest.approx(second.bubble - first.bubble)
    assert change["num_dropped"] == 0
    _, out, _ = report(capsys, folder / "first", folder / "second")
    assert f"{change['moved_bytes']:+.1%}" in out and f"{change['bubble'] * 100:+.2f} pt" in out


def test_a_replay_confirms_the_run(runs, capsys):
    folder, stats = runs
    code, out, _ = report(capsys, folder / "first", "--replay")
    count = len(stats[0])
    assert code == 0 and f"{count} of {count} steps come out exactly as they ran" in out


def test_a_replay_finds_a_figure_that_the_plan_did_not_have(runs, tmp_path, capsys):
    folder, stats = runs

    def planted(one):
        return msgspec.structs.replace(one, imbalance=one.imbalance + 1e-9) if one.step == 2 else one

    rewrite(folder / "first", tmp_path / "changed", planted)
    code, out, _ = report(capsys, tmp_path / "changed", "--replay")
    assert code == 1 and f"{len(stats[0]) - 1} of {len(stats[0])} steps" in out
    assert f"  step 2: imbalance was {stats[0][2].imbalance + 1e-9!r}, is {stats[0][2].imbalance!r}\n" in out


def test_slowest_steps_are_timed_by_the_hand_out_behind_them(runs, tmp_path, capsys):
    """The interval of a step's hand-out is the time of the step before; a step whose successor is missing has none."""
    folder, _ = runs
    seconds = {1: 5.0, 2: 1.0, 3: 9.0}

    def timed(one):
        return None if one.step == 0 else msgspec.structs.replace(one, step_seconds=seconds.get(one.step, 0.1))

    rewrite(folder / "first", tmp_path / "timed", timed)
    _, out, _ = report(capsys, tmp_path / "timed", "--json", "--slowest", 2)
    slowest = json.loads(out)["runs"][0]["slowest"]
    assert [(one["step"], one["seconds"]) for one in slowest] == [(2, 9.0), (1, 1.0)]


def test_steps_that_are_missing_are_counted(runs, tmp_path, capsys):
    folder, _ = runs
    rewrite(folder / "first", tmp_path / "gaps", lambda one: None if one.step in (1, 2) else one)
    code, out, _ = report(capsys, tmp_path / "gaps")
    assert code == 0 and "2 steps between those were not recorded" in out


def test_curves_lie_at_the_numbers_of_their_steps(runs, tmp_path):
    """Recording that began late and lost steps: each step is drawn at its number."""
    folder, stats = runs
    rewrite(folder / "first", tmp_path / "gaps", lambda one: None if one.step in (0, 2) else one)
    [view] = as_page([read_report(tmp_path / "gaps", pictures=True)]).runs
    kept = [one for one in stats[0] if one.step not in (0, 2)]
    for curve, name in zip(view.curves, ("imbalance", "imbalance_home"), strict=True):
        assert list(curve.steps) == [one.step for one in kept]
        assert list(curve.values) == [1 / max(1.0, getattr(one, name)) for one in kept]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((2, 3, 5), "2, 3 from step 2 on, 5 from step 4 on"),
        ((2, 3, 4, 5, 6, 7, 8), "2, 3 from step 2 on, 4 from step 4 on, 3 more, 8 from step 12 on"),
    ],
)
def test_settings_that_changed_are_said_to_vary(tmp_path, capsys, sizes, told):
    record_ramp(tmp_path / "ramp", sizes)
    code, out, _ = report(capsys, tmp_path / "ramp", "--replay")
    assert code == 0 and ", samples_per_step varies, " in out and f": samples_per_step varies: {told}\n" in out
    _, out, _ = report(capsys, tmp_path / "ramp", "--json")
    [found] = json.loads(out)["runs"]
    assert found["varying"] == {
        "samples_per_step": [{"from_step": 2 * k, "value": size} for k, size in enumerate(sizes)]
    }  # fmt: skip


def test_a_damaged_step_is_a_note(runs, tmp_path, capsys):
    folder, stats = runs
    rewrite(folder / "first", tmp_path / "damaged", lambda one: one)
    with sqlite3.connect(tmp_path / "damaged" / FILE) as connection:
        connection.execute("UPDATE steps SET checksum = 0 WHERE step = 2")
    connection.close()
    code, out, err = report(capsys, tmp_path / "damaged", "--json")
    [found] = json.loads(out)["runs"]
    assert code == 0 and found["summary"]["steps"] == len(stats[0]) - 1
    assert err.count("\n") == 1 and "step 2 is damaged" in err and found["notes"] == [err.strip().split(": ", 1)[1]]


def test_a_run_without_a_step_yet(runs, tmp_path, capsys):
    rewrite(runs[0] / "first", tmp_path / "begun", lambda one: None)
    code, _, err = report(capsys, tmp_path / "begun")
    assert code == 1 and "holds no whole step yet" in err


def test_advice_has_its_figure(tmp_path, capsys):
    """One sample a step for each of three ranks, of very different lengths: more of them balance."""
    record(tmp_path / "small", samples_per_step=1, count=24)
    _, out, _ = report(capsys, tmp_path / "small", "--json")
    kinds = {advice["kind"]: advice["gain"] for advice in json.loads(out)["runs"][0]["advice"]}
    assert kinds["samples_per_step"] > 0.1
    _, out, _ = report(capsys, tmp_path / "small", "--json", "--no-advice")
    assert json.loads(out)["runs"][0]["advice"] == []


def test_page(runs, tmp_path, capsys):
    folder, _ = runs
    page = tmp_path / "page.html"
    code, _, _ = report(capsys, folder / "first", folder / "second", "--html", page)
    text = page.read_text(encoding="utf-8")
    assert code == 0
    for needle in (str(folder / "first"), str(folder / "second"), "had samples stayed at home", "Slowest steps"):
        assert needle in text, needle


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{tmp}/none"], "does not exist: name the folder of a RunLog"),
        (["{tmp}"], "holds no run log"),
        (["{tmp}/other.sqlite"], "is not a run log"),
        (["{tmp}/empty.sqlite"], "is not a run log"),
        (["a", "b", "c"], "one run is shown, or two are compared, got 3"),
        (["a", "--slowest", "-1"], "--slowest must be an integer of at least 0, got -1"),
        (["a", "--html", "{tmp}/no/page.html"], "--html: no folder"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, arguments, text):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.sqlite").write_bytes(b"something else" * 9)
    (tmp_path / "folder" / "empty.sqlite").write_bytes(b"")
    if arguments == ["{tmp}"]:
        arguments = [str(tmp_path)]
    code, out, err = report(capsys, *(one.format(tmp=tmp_path / "folder") for one in arguments))
    assert (code, out) == (1, "") and err.startswith("evenpack report: ") and text in err and err.count("\n") == 1


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["report", "--help"])
    assert ended.value.code == 0 and "evenpack report runs/first runs/second" in capsys.readouterr().out
