"""The run log: what is read is what ran, bit for bit, whatever happened to the file."""

import functools
import itertools
import sqlite3
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from evenpack.cli.what_if.workloads import image_text
from evenpack.scheduler import PackingScheduler, RunLog, SampleTable, SchedulerConfig, StepPlan, plan_step, read_run
from evenpack.scheduler.stats import step_stats
from evenpack.scheduler.telemetry.run_log import replay_differences, store
from evenpack.scheduler.telemetry.run_log.record import decode_step, encode_step
from evenpack.scheduler.telemetry.run_log.store import FILE

from ..helpers import TEXT, random_source
from .runs import record, record_ramp


def assert_equal_steps(recorded, ran):
    """Compare every figure, and every array of table and plan."""
    assert [step.stats for step in recorded] == [stats for stats, _, _ in ran]
    for step, (_, table, plan) in zip(recorded, ran, strict=True):
        for name in SampleTable.__struct_fields__:
            assert np.array_equal(getattr(step.table, name), getattr(table, name)), name
            assert getattr(step.table, name).shape == getattr(table, name).shape
        for name in StepPlan.__struct_fields__:
            was, now = getattr(plan, name), getattr(step.plan, name)
            assert np.array_equal(was, now) if isinstance(was, np.ndarray) else was == now, name


RUNS = [
    {"sync": sync, "movement": movement, "images": images}
    for sync in ("step", "microbatch")
    for movement in ("minimal", "free")
    for images in (False, True)
] + [
    {"scope": "rank"},
    {"lookahead": 2, "samples_per_step": 2, "num_ranks": 2},
    {"tokens_per_step": 300},
    {"num_microbatches": 1, "oversize": "drop", "max_tokens": 110},
    {"pipeline_stages": 2, "microbatch_cost": 50, "align": 4, "pack_align": 8},
    {"on_exhausted": "stop", "max_segments": 3},
]


@pytest.mark.parametrize("settings", RUNS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_recorded_run_reads_and_replays_exactly(tmp_path, settings):
    """Table, plan and figures are those of the run; planning the recorded lengths again gives its imbalance and bytes."""
    ran = record(tmp_path, **settings)
    recorded = list(read_run(tmp_path))
    assert len(recorded) >= 2
    assert_equal_steps(recorded, ran)
    assert [replay_differences(step) for step in recorded] == [[]] * len(recorded)
    assert any(step.stats.moved_bytes for step in recorded) != (settings.get("scope") == "rank")


def test_a_replay_tells_what_differs(tmp_path):
    record(tmp_path, sync="microbatch")
    step = next(step for step in read_run(tmp_path) if step.stats.moved_bytes)
    planted = msgspec.structs.replace(step, stats=msgspec.structs.replace(step.stats, moved_bytes=step.stats.moved_bytes + 1))
    [line] = replay_differences(planted)
    assert line == f"moved_bytes was {step.stats.moved_bytes + 1}, is {step.stats.moved_bytes}"
    other = msgspec.structs.replace(step, header=msgspec.structs.replace(step.header, code_version="0" * 16))
    assert replay_differences(other) == []  # another version that plans alike
    own = msgspec.structs.replace(step, header=msgspec.structs.replace(step.header, planner="mine.plan"))
    with pytest.raises(ValueError, match=r"planned by mine\.plan"):
        replay_differences(own)


def test_lists_of_the_source_replay_where_they_came(tmp_path):
    def lists(rank):
        samples = random_source(rank, 8)
        return [samples[at : at + 1] for at in range(8)]

    config = SchedulerConfig(max_tokens=128, scope="microbatch", num_microbatches=2)
    with PackingScheduler(lists(0), config=config, adapter=TEXT, callbacks=[RunLog(tmp_path)]) as scheduler:
        ran = [(step.stats, step.table, step.plan) for step in scheduler]
    recorded = list(read_run(tmp_path))
    assert_equal_steps(recorded, ran)
    assert [replay_differences(step) for step in recorded] == [[]] * 4


@pytest.mark.parametrize("movement", ["minimal", "free"])
@pytest.mark.parametrize("phases", [1, 2])
def test_fewer_than_forty_bytes_a_sample(phases, movement):
    """Image-text samples with large costs and megabytes of pixels, at 64 ranks."""
    work = image_text(np.random.default_rng(0), 64, 64, phases=phases)
    towers = msgspec.structs.replace(work.towers, dummy_cost={"image": (1,) * phases, "video": (1,) * phases})
    config = SchedulerConfig(max_tokens=work.capacity, samples_per_step=64, movement=movement)
    plan = plan_step(work.table, num_ranks=64, config=config, towers=towers)
    stats = step_stats(work.table, plan, config=config)
    assert 8 < len(encode_step(stats, work.table, plan)) / len(work.table) < 40


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ([5], 0),
        ([-3, -3], 0),
        ([0, 255], 1),
        ([0, 256], 2),
        ([-(2**31), 2**31 - 1], 4),
        ([-(2**53), 2**53], 8),
        ([-5, 2**62], 8),
    ],
)
def test_columns_hold_any_integers_in_the_narrowest_type(tmp_path, values, width):
    """`nbytes` of a step's samples: read as they were, in records that differ by their width alone."""
    record(tmp_path, num_ranks=1, count=4)
    step = next(iter(read_run(tmp_path)))
    sizes = []
    for column in ([7] * len(step.table), np.resize(values, len(step.table))):
        table = msgspec.structs.replace(step.table, nbytes=np.array(column, np.int64))
        data = encode_step(step.stats, table, step.plan)
        assert decode_step(data, step.header).table.nbytes.tolist() == list(column)
        sizes.append(len(data))
    assert len(set(values)) == 1 or 0 <= sizes[1] - sizes[0] - width * len(step.table) <= 12


def test_the_oldest_steps_go(tmp_path):
    ran = record(tmp_path, count=40, log={"max_steps": 3})
    assert_equal_steps(list(read_run(tmp_path)), ran[-3:])


def test_a_reader_looks_while_the_log_is_written(tmp_path):
    """Both at once, on two threads: every look finds whole steps from the first on, and the writer loses none."""
    log, looks = RunLog(tmp_path, max_waiting=1000), []
    with steps_of(log, 200) as scheduler:
        next(scheduler)
        deadline = time.monotonic() + 60
        for step in itertools.chain([None], scheduler):
            while not looks and not (looks := [one.stats.step for one in read_run(tmp_path)]) and time.monotonic() < deadline:
                time.sleep(0.01)
            if step is not None and step.stats.step % 20 == 0:
                looks = [one.stats.step for one in read_run(tmp_path)]
                assert looks == list(range(len(looks)))
    assert [one.stats.step for one in read_run(tmp_path)] == list(range(200))


def test_damaged_records_are_left_out_and_named(tmp_path):
    ran = record(tmp_path, count=12)
    with sqlite3.connect(tmp_path / FILE) as connection:
        data = connection.execute("SELECT record FROM steps WHERE step = 1").fetchone()[0]
        connection.execute("UPDATE steps SET record = ? WHERE step = 1", (data[:-1] + bytes([data[-1] ^ 1]),))
    connection.close()
    with pytest.warns(RuntimeWarning, match="step 1 is damaged and not read"):
        assert_equal_steps(list(read_run(tmp_path)), [ran[0], *ran[2:]])


def test_a_damaged_file_is_one_clear_error(tmp_path):
    record(tmp_path, count=40)
    data = bytearray((tmp_path / FILE).read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ValueError, match=r"run\.sqlite is damaged"):
        list(read_run(tmp_path))


def test_settings_that_change_are_those_of_each_step(tmp_path):
    """A batch that grows: every step has the settings that it was planned under."""
    ran = record_ramp(tmp_path, (2, 3, 3, 5))
    recorded = list(read_run(tmp_path))
    assert [step.header.config.samples_per_step for step in recorded] == [2, 2, 3, 3, 3, 3, 5, 5]
    assert [step.header.first_step for step in recorded] == [0, 0, 2, 2, 2, 2, 6, 6]
    assert_equal_steps(recorded, ran)
    assert not any(map(replay_differences, recorded))


def test_other_files_are_refused(tmp_path):
    """Other content, another program's database, another version: by the reader and the writer."""

    def refused(text):
        with pytest.raises(ValueError, match=text):
            read_run(tmp_path)
        with pytest.raises(ValueError, match=text), steps_of(RunLog(tmp_path)) as scheduler:
            next(scheduler)

    (tmp_path / FILE).write_bytes(b"x" * 4096)
    refused("is not a run log")
    (tmp_path / FILE).unlink()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("CREATE TABLE mine (id INTEGER)")
    connection.close()
    refused("is not a run log")
    (tmp_path / FILE).unlink()
    record(tmp_path, count=4)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    refused("is a run log of version 99, this evenpack reads version 2")


def test_figures_of_another_version_are_refused(tmp_path):
    record(tmp_path, count=4)
    header = msgspec.structs.replace(next(read_run(tmp_path)).header, stats_fields=("step",), version="9.9")
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE headers SET content = ?", (msgspec.msgpack.encode(header),))
    connection.close()
    with pytest.raises(ValueError, match=r"recorded by evenpack 9\.9"):
        list(read_run(tmp_path))


def test_no_log_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="holds no run log"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        read_run(tmp_path / "no")


def test_a_resume_goes_on_in_the_same_folder(tmp_path):
    """A run that recorded beyond its checkpoint, and went on from it: every step once, as trained last."""

    def run(state, num_steps):
        config = SchedulerConfig(max_tokens=128, samples_per_step=2, prefetch=0)
        log, ran = RunLog(tmp_path), []
        with PackingScheduler(random_source(0, 20), config=config, adapter=TEXT, callbacks=[log]) as scheduler:
            if state is not None:
                scheduler.load_state_dict(state)
            for _ in range(num_steps):
                if len(ran) == 4:
                    state = scheduler.state_dict()
                step = next(scheduler)
                ran.append((step.stats, step.table, step.plan))
        return ran, state

    first, state = run(None, 7)
    second, _ = run(state, 6)
    recorded = list(read_run(tmp_path))
    assert [step.stats.step for step in recorded] == list(range(10))
    assert_equal_steps(recorded, [*first[:4], *second])


def test_only_the_first_rank_writes(tmp_path):
    record(tmp_path, num_ranks=4)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(("make", "error"), [("file", NotADirectoryError), ("below", NotADirectoryError)])
def test_a_wrong_path_is_an_error_at_construction(tmp_path, make, error):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(error, match="taken is a file"):
        RunLog(tmp_path / "taken" / ("" if make == "file" else "run"))


@pytest.mark.parametrize("name", ["max_steps", "max_waiting"])
def test_settings_out_of_range(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        RunLog(tmp_path, **{name: 0})


def steps_of(log, count=6):
    config = SchedulerConfig(max_tokens=128, samples_per_step=2, prefetch=0)
    return PackingScheduler(random_source(0, 2 * count), config=config, adapter=TEXT, callbacks=[log])


def limit_pages(connection):
    """No more pages than the database has: sqlite's own full disk."""
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")


def test_a_full_disk_stops_the_recording_and_not_the_training(tmp_path, monkeypatch):
    """What does not fit is taken back, a warning says so once, and the steps before read."""
    written, looked, full = [], threading.Event(), threading.Event()

    def write(writer, steps, original=store.StepWriter.write):
        if len(written) >= 3:
            limit_pages(writer.connection)
            steps = steps * 50
            full.set()
        looked.set()
        original(writer, steps)
        written.extend(steps)

    monkeypatch.setattr(store.StepWriter, "write", write)
    full_disk = pytest.warns(RuntimeWarning, match="recording stops, training continues.*is full")
    with full_disk as caught, steps_of(RunLog(tmp_path), 20) as scheduler:
        for _ in range(20):
            looked.clear()
            next(scheduler)
            assert full.is_set() or looked.wait(60)
    assert len(caught) == 1
    found = [step.stats.step for step in read_run(tmp_path)]
    assert found == [stats.step for stats, *_ in written] and len(found) >= 3


def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch):
    """An error of the first `next`."""

    class Full(sqlite3.Connection):
        def execute(self, query, *arguments):
            if "CREATE TABLE headers" in query:
                limit_pages(super())
            return super().execute(query, *arguments)

    monkeypatch.setattr(store.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Full))
    with steps_of(RunLog(tmp_path)) as scheduler:
        with pytest.raises(OSError, match="is full") as caught:
            next(scheduler)
        assert len(list(scheduler)) == 6  # whoever continues all the same trains without a log
    assert "raised by the callback RunLog" in caught.value.__notes__[0]


def test_a_slow_disk_leaves_steps_out_and_says_so(tmp_path, monkeypatch):
    gate = threading.Event()
    encode = store.encode_step

    def slow(*step):
        gate.wait()
        return encode(*step)

    monkeypatch.setattr(store, "encode_step", slow)
    with pytest.warns(RuntimeWarning) as caught, steps_of(RunLog(tmp_path, max_waiting=2)) as scheduler:
        steps = list(scheduler)
        gate.set()
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2 and "does not keep up" in texts[0], texts
    recorded = [step.stats.step for step in read_run(tmp_path)]
    assert len(steps) == 6 and recorded == [0, 1]
    assert "4 steps were not recorded" in texts[1]


def trained(log, num_steps, state=None):
    """Train, and return what ran and the state behind it."""
    with steps_of(log, 10) as scheduler:
        if state is not None:
            scheduler.load_state_dict(state)
        steps = [next(scheduler) for _ in range(num_steps)]
        return [(step.stats, step.table, step.plan) for step in steps], scheduler.state_dict()


def test_a_closed_log_takes_another_run(tmp_path):
    """A second scheduler takes the log: from a checkpoint as a resume in another process does, or from the beginning."""
    log = RunLog(tmp_path)
    first, state = trained(log, 4)
    second, _ = trained(log, 3, state)
    assert_equal_steps(list(read_run(tmp_path)), [*first, *second])
    with pytest.warns(RuntimeWarning, match="already holds a run; reading it returns only the new one") as caught:
        third, _ = trained(log, 5)
    assert len(caught) == 1
    assert_equal_steps(list(read_run(tmp_path)), third)
    assert_equal_steps(list(read_run(tmp_path / FILE, run=1)), [*first, *second])
    assert_equal_steps(list(read_run(tmp_path, run=0)), first)


def test_a_state_that_is_loaded_between_epochs_counts_steps_once(tmp_path):
    with steps_of(RunLog(tmp_path), 4) as scheduler:
        next(scheduler)
        state, before = scheduler.state_dict(), next(scheduler).table
        assert len(list(scheduler)) == 2
        scheduler.load_state_dict(state)
        assert len(list(scheduler)) == 3
    recorded = list(read_run(tmp_path))
    assert [step.stats.step for step in recorded] == [0, 1, 2, 3]
    assert np.array_equal(recorded[1].table.tokens, before.tokens)


def test_two_schedulers_at_a_time_cannot_share_a_log(tmp_path):
    log = RunLog(tmp_path)
    with steps_of(log) as first, steps_of(log, 2) as second:
        next(first)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is another scheduler's, which has not closed it"):
                next(second)
            next(second)  # it is not lost
        next(first)
    assert [step.stats.step for step in read_run(tmp_path)] == [0, 1]


JOB = """
import sys
from evenpack.scheduler import PackingScheduler, RunLog, SchedulerConfig
from evenpack.models import adapter_for
source = [{"input_ids": [1] * (3 + n % 50)} for n in range(4000)]
config = SchedulerConfig(max_tokens=128, samples_per_step=8)
log = RunLog(sys.argv[1], max_waiting=10**6)
scheduler = PackingScheduler(source, config=config, adapter=adapter_for("text"), callbacks=[log])
while True:
    for step in scheduler:
        print(step.stats.step, flush=True)
"""


def test_a_process_that_is_killed_leaves_what_it_recorded(tmp_path):
    """SIGKILL in the middle of training: whole records, which replay, all but those of the last moment."""
    with subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        before = 0
        for line in process.stdout:
            if int(line) % 10 == 0 and (before := len(list(read_run(tmp_path)))) >= 20:
                break
        process.kill()
    recorded = list(read_run(tmp_path))
    assert [step.stats.step for step in recorded] == list(range(len(recorded))) and len(recorded) >= before >= 20
    assert [replay_differences(step) for step in recorded[-9:]] == [[]] * 9
