"""The run log: what is read is what ran, bit for bit, whatever happened to the file."""

import io
import os
import re
import subprocess
import sys
import threading
import warnings

import msgspec
import numpy as np
import pytest

from evenpack.cli.what_if.workloads import image_text
from evenpack.scheduler import PackingScheduler, RunLog, SampleTable, SchedulerConfig, StepPlan, plan_step, read_run
from evenpack.scheduler.run_log import frames, recording, replay_differences
from evenpack.scheduler.run_log.columns import pack, unpack
from evenpack.scheduler.run_log.reader import run_files
from evenpack.scheduler.run_log.record import encode_step
from evenpack.scheduler.stats import step_stats

from ..scheduler.helpers import TEXT, random_source
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
    {"defer": 2, "samples_per_step": 2, "num_ranks": 2},
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
    stats = step_stats(work.table, plan, step=0, dropped=0, truncated=0, waits=np.zeros(0, np.int64))
    assert 8 < len(frames.frame(encode_step(stats, work.table, plan))) / len(work.table) < 40


@pytest.mark.parametrize(
    ("values", "width"),
    [([], 0), ([5], 0), ([-3, -3], 0), ([0, 255], 1), ([-1, 255], 2), ([-(2**31), 2**31 - 1], 4), ([-(2**53), 2**53], 8)],
)
def test_columns_hold_any_integers_in_the_narrowest_type(values, width):
    column = pack(np.array(values, np.int64))
    assert column.width == width and len(column.data) == width * len(values)
    assert unpack(column).tolist() == values


def test_columns_of_random_spread():
    rng = np.random.default_rng(0)
    for _ in range(300):
        low, spread = int(rng.integers(-(2**60), 2**60)), int(rng.integers(1, 2 ** int(rng.integers(1, 62))))
        values = low + rng.integers(0, spread, int(rng.integers(1, 9)))
        assert np.array_equal(unpack(pack(values)), values)


def test_files_rotate_by_size_and_old_ones_go(tmp_path):
    ran = record(tmp_path / "all", count=40, log={"max_bytes": 2100})
    files = run_files(tmp_path / "all")
    assert len(files) > 2 and all(file.stat().st_size <= 2100 for file in files)
    assert_equal_steps(list(read_run(tmp_path / "all")), ran)
    record(tmp_path / "few", count=40, log={"max_bytes": 2100, "max_files": 2})
    assert [file.name for file in run_files(tmp_path / "few")] == [file.name for file in files[-2:]]
    assert [step.stats.step for step in read_run(tmp_path / "few")][-1] == len(ran) - 1


def test_a_file_that_is_cut_anywhere_gives_its_whole_records(tmp_path):
    """Every length of the file: a prefix of the steps, a warning unless the cut is between two records."""
    record(tmp_path, count=12)
    [file] = run_files(tmp_path)
    data, ends = file.read_bytes(), []
    at = len(frames.PREAMBLE)
    while at < len(data):
        at += 12 + int.from_bytes(data[at + 4 : at + 8], "little")
        ends.append(at)
    for size in range(len(data)):
        file.write_bytes(data[:size])
        damage = []
        payloads = list(frames.read_frames(file, damage))
        assert len(payloads) == sum(end <= size for end in ends)
        assert len(damage) == (size not in (len(frames.PREAMBLE), *ends))
    file.write_bytes(data[:-1])
    with pytest.warns(RuntimeWarning, match="the last record is cut off"):
        assert len(list(read_run(tmp_path))) == len(ends) - 2


def test_damage_in_the_middle_costs_the_records_that_it_hit(tmp_path):
    """Any byte changed: at most one record is lost (two where its length grew over the next), the others are as they were."""
    ran = record(tmp_path, count=12)
    [file] = run_files(tmp_path)
    data = file.read_bytes()
    header = len(frames.PREAMBLE) + 12 + int.from_bytes(data[len(frames.PREAMBLE) + 4 :][:4], "little")
    rng = np.random.default_rng(0)
    for at in rng.choice(np.arange(header, len(data)), 60, replace=False).tolist():
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with pytest.warns(RuntimeWarning, match="not read"):
            found = list(read_run(tmp_path))
        assert len(found) == len(ran) - 1
        numbers = [step.stats.step for step in found]
        assert_equal_steps(found, [ran[number] for number in numbers])


def test_settings_that_change_are_those_of_each_step(tmp_path):
    """A batch that grows, in one file: every step has the settings that it was planned under."""
    ran = record_ramp(tmp_path, (2, 3, 3, 5))
    recorded = list(read_run(tmp_path))
    assert [step.header.config.samples_per_step for step in recorded] == [2, 2, 3, 3, 3, 3, 5, 5]
    assert [step.header.first_step for step in recorded] == [0, 0, 2, 2, 2, 2, 6, 6]
    assert len(run_files(tmp_path)) == 1
    assert_equal_steps(recorded, ran)
    assert not any(map(replay_differences, recorded))


@pytest.mark.parametrize(("damaged", "kept"), [(0, [2, 3, 4, 5]), (1, [0, 1, 4, 5])])
def test_steps_whose_settings_were_damaged_are_not_read_under_others(tmp_path, damaged, kept):
    record_ramp(tmp_path, (2, 3, 5))
    [file] = run_files(tmp_path)
    data = bytearray(file.read_bytes())
    at = [m.start() for m in re.finditer(rb"\xe5EVP.{8}H", data, re.DOTALL)][damaged]
    data[at + 40] ^= 1
    file.write_bytes(data)
    with pytest.warns(RuntimeWarning) as caught:
        assert [step.stats.step for step in read_run(tmp_path)] == kept
    assert [("2 steps are not read" in str(one.message), "damaged" in str(one.message)) for one in caught] == [
        (False, True), (True, False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"x" * 100, "is not a run log"), (b"evenpack run\x63\0\0\0", "of version 99, this is version 1")],
)
def test_other_files_are_refused(tmp_path, content, text):
    (tmp_path / "000000.steps").write_bytes(content)
    with pytest.raises(ValueError, match=text):
        list(read_run(tmp_path))


def test_no_log_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="holds no run log"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        read_run(tmp_path / "no")


def test_a_resume_goes_on_in_the_same_folder(tmp_path):
    """A run that recorded beyond its checkpoint, was killed in a record, and went on: every step once, as trained last."""

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
    file = run_files(tmp_path)[0]
    file.write_bytes(file.read_bytes()[:-5])
    second, _ = run(state, 6)
    with pytest.warns(RuntimeWarning, match="cut off"):
        recorded = list(read_run(tmp_path))
    assert [step.stats.step for step in recorded] == list(range(10))
    assert_equal_steps(recorded, [*first[:4], *second])


def test_only_the_first_rank_writes(tmp_path):
    record(tmp_path, num_ranks=4)
    assert len(run_files(tmp_path)) == 1


@pytest.mark.parametrize(("make", "error"), [("file", NotADirectoryError), ("below", NotADirectoryError)])
def test_a_wrong_path_is_an_error_at_construction(tmp_path, make, error):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(error, match="taken is a file"):
        RunLog(tmp_path / "taken" / ("" if make == "file" else "run"))


@pytest.mark.parametrize("name", ["max_bytes", "max_files", "max_waiting"])
def test_settings_out_of_range(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        RunLog(tmp_path, **{name: 0})


def steps_of(log, count=6):
    config = SchedulerConfig(max_tokens=128, samples_per_step=2, prefetch=0)
    return PackingScheduler(random_source(0, 2 * count), config=config, adapter=TEXT, callbacks=[log])


def test_a_full_disk_stops_the_recording_and_not_the_training(tmp_path):
    """The device takes half of a record: it is taken back, a warning says so once, and what was written reads."""
    log = RunLog(tmp_path)
    with steps_of(log) as scheduler:
        for _ in range(3):
            next(scheduler)
        began = log._recording
        began._ending.set()  # what waits is written, then the thread ends
        began._thread.join()
        whole = run_files(tmp_path)[0].read_bytes()
        began._file._file = Full(run_files(tmp_path)[0])
        next(scheduler)
        began._run()
        with pytest.warns(RuntimeWarning, match="recording stops, training goes on.*No space left") as caught:
            rest = list(scheduler)
        assert len(rest) == 2 and len(caught) == 1
    assert run_files(tmp_path)[0].read_bytes() == whole
    assert [step.stats.step for step in read_run(tmp_path)] == [0, 1, 2]


class Full:
    """A file on a disk that has 20 bytes left."""

    def __init__(self, path):
        self._file, self._room = io.FileIO(path, "r+b"), 20
        self._file.seek(0, os.SEEK_END)

    def write(self, data):
        if not self._room:
            raise OSError(28, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_real_device_that_is_full(tmp_path, monkeypatch):
    """`/dev/full` takes nothing: the header fails before the first step, an error of the first `next`."""
    monkeypatch.setattr(recording, "_open_next", lambda folder: io.FileIO("/dev/full", "wb"))
    with steps_of(RunLog(tmp_path)) as scheduler:
        with pytest.raises(OSError, match="No space left") as caught:
            next(scheduler)
        assert len(list(scheduler)) == 6  # whoever goes on all the same trains without a log
    assert "raised by the callback RunLog" in caught.value.__notes__[0]


def test_a_slow_disk_leaves_steps_out_and_says_so(tmp_path, monkeypatch):
    gate = threading.Event()
    encode = recording.encode_step

    def slow(*step):
        gate.wait()
        return encode(*step)

    monkeypatch.setattr(recording, "encode_step", slow)
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


def test_a_closed_log_goes_on_in_a_new_file(tmp_path):
    """A second scheduler takes the log: from a checkpoint as a resume in another process does, or from the beginning."""
    log = RunLog(tmp_path)
    first, state = trained(log, 4)
    second, _ = trained(log, 3, state)
    assert_equal_steps(list(read_run(tmp_path)), [*first, *second])
    with pytest.warns(RuntimeWarning, match="a run begins anew where another is recorded") as caught:
        third, _ = trained(log, 5)
    assert len(caught) == 1
    assert_equal_steps(list(read_run(tmp_path)), third)
    assert_equal_steps([step for file in run_files(tmp_path) for step in read_run(file)], [*first, *second, *third])


def test_a_state_that_is_loaded_between_epochs_counts_steps_once(tmp_path):
    with steps_of(RunLog(tmp_path), 4) as scheduler:
        next(scheduler)
        state, before = scheduler.state_dict(), next(scheduler).table
        assert len(list(scheduler)) == 2
        scheduler.load_state_dict(state)
        assert len(list(scheduler)) == 3
    recorded = list(read_run(tmp_path))
    assert [step.stats.step for step in recorded] == [0, 1, 2, 3] and len(run_files(tmp_path)) == 2
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
import sys, time
from evenpack.scheduler import PackingScheduler, RunLog, SchedulerConfig
from evenpack.models import adapter_for
source = [{"input_ids": [1] * (3 + n % 50)} for n in range(4000)]
config = SchedulerConfig(max_tokens=128, samples_per_step=8)
scheduler = PackingScheduler(source, config=config, adapter=adapter_for("text"), callbacks=[RunLog(sys.argv[1])])
while True:
    for step in scheduler:
        time.sleep(0.005)
        print(step.stats.step, flush=True)
"""


def test_a_process_that_is_killed_leaves_what_it_recorded(tmp_path):
    """SIGKILL in the middle of training: whole records, which replay, and at most one that was cut."""
    with subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        size = 0
        while size < 30_000:  # some fifty records
            process.stdout.readline()
            size = sum(file.stat().st_size for file in tmp_path.glob("*.steps"))
        process.kill()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a record that the kill may have cut
        recorded = list(read_run(tmp_path))
    assert size <= 1500 + sum(step.num_bytes + 12 for step in recorded)
    assert len(recorded) > 20
    assert [replay_differences(step) for step in recorded[-9:]] == [[]] * 9
