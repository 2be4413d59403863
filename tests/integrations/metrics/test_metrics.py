"""Metrics in the real libraries: event files, an offline run and a scraped endpoint that hold the scheduler's figures."""

import glob
import os
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from evenpack.integrations.metrics import Metrics, PrometheusMetrics, TensorBoardMetrics, WandbMetrics
from evenpack.integrations.metrics.base import import_library
from evenpack.integrations.metrics.prometheus import COUNTERS
from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig, StepStats, Summary
from evenpack.scheduler.testing import run_ranks

from ...scheduler.helpers import TEXT, random_source

#: Figures that an entry has whatever the steps: the times are missing in the first step of an epoch.
TIMES = {"tokens_per_second", "step_seconds", "exposed_share"}
ALWAYS = set(Summary.__struct_fields__) - TIMES


def run(make, num_ranks=2, count=12):
    """Train an epoch on simulated ranks; return every step's figures and what `make(rank)` made on rank 0."""

    def fn(rank, num_ranks):
        callback = make(rank)
        config = SchedulerConfig(max_tokens=128, samples_per_step=4, timeout=20.0)
        with PackingScheduler(
            random_source(rank, count), config=config, adapter=TEXT, groups=ProcessGroups.from_world(), callbacks=[callback]
        ) as scheduler:
            return [step.stats for step in scheduler], callback

    return run_ranks(fn, num_ranks)[0]


def stats_of(**values):
    """Return figures of a step with some of them set."""
    names = dict.fromkeys(StepStats.__struct_fields__, 0)
    return StepStats(
        **{
            **names,
            "phase_efficiency": (),
            "imbalance": 1.0,
            "imbalance_home": 1.0,
            "step_seconds": None,
            "tokens_per_second": None,
        }
        | values
    )


def test_a_summary_by_hand():
    """Sums add up, shares are of the sums, means are of the steps; a step without an interval counts in no rate."""
    steps = [
        stats_of(tokens=90, padded_tokens=100, imbalance=1.5, moved_bytes=10, shuffle_bytes=40, exposed_seconds=7.0),
        stats_of(tokens=10, padded_tokens=100, imbalance=1.0, moved_bytes=20, shuffle_bytes=60, exposed_seconds=1.0,
                 num_dropped=1, step_seconds=3.0, tokens_per_second=30.0),
        stats_of(tokens=20, padded_tokens=40, imbalance=1.25, exposed_seconds=0.5, step_seconds=2.0, tokens_per_second=5.0,
                 num_carried=2, longest_delay=3),
    ]  # fmt: skip
    found = Summary.of(iter(steps))
    assert (found.steps, found.tokens, found.moved_bytes, found.num_dropped, found.longest_delay) == (3, 120, 30, 1, 3)
    assert found.padding_share == 1 - 120 / 240 and found.imbalance == 1.25 and found.bubble == pytest.approx(0.2)
    assert found.moved_share == 0.3 and found.num_carried == pytest.approx(2 / 3)
    assert found.tokens_per_second == (90 + 10) / 5 and found.step_seconds == 2.5
    assert found.exposed_seconds == 8.5 and found.exposed_share == 1.5 / 5
    nothing = Summary.of([])
    assert nothing.tokens_per_second is nothing.step_seconds is nothing.exposed_share is None and nothing.padding_share == 0


def test_tensorboard_event_files_hold_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stats, _ = run(lambda rank: TensorBoardMetrics(tmp_path))
    assert len(glob.glob(str(tmp_path / "events.out.tfevents.*"))) == 1  # rank 0 alone
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"evenpack/{name}" for name in ALWAYS | TIMES}
    for name, of in (("imbalance", "imbalance"), ("gap_to_bound", "gap"), ("moved_bytes", "moved_bytes"), ("bubble", "bubble")):
        points = events.Scalars(f"evenpack/{name}")
        assert [point.step for point in points] == [0, 1, 2]
        assert [point.value for point in points] == pytest.approx([getattr(one, of) for one in stats])
    assert [point.step for point in events.Scalars("evenpack/tokens_per_second")] == [1, 2]


def test_a_folder_that_cannot_be_opened_is_a_warning_and_training_goes_on(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.warns(RuntimeWarning, match="TensorBoardMetrics: no more metrics are written, training goes on") as caught:
        stats, _ = run(lambda rank: TensorBoardMetrics(tmp_path / "taken" / "board"))
    assert len(stats) == 3 and len(caught) == 1


def test_a_disk_that_is_full_at_the_end_is_a_warning():
    """The writer's thread meets the error, and `close` raises it."""
    metrics = TensorBoardMetrics("unused")
    metrics._writer = SimpleNamespace(add_scalar=lambda *_, **__: None, close=lambda: os.close(-1))
    with pytest.warns(RuntimeWarning, match="no more metrics are written, training goes on: .*Bad file descriptor"):
        metrics.close()
    metrics.close()


def test_entries_of_several_steps_and_a_writer_of_ones_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        stats, _ = run(lambda rank: TensorBoardMetrics(writer=writer, every=2, prefix="packing/"))
        writer.add_scalar("mine", 1.0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("packing/tokens")] == [
        (1, stats[0].tokens + stats[1].tokens),
        (2, stats[2].tokens),  # what was left at the end
    ]
    assert events.Scalars("mine")


OFFLINE = """
import sys, wandb
from evenpack.integrations.metrics import WandbMetrics
from tests.integrations.metrics.test_metrics import run
with wandb.init(project="packing", mode="offline", dir=sys.argv[1], settings=wandb.Settings(console="off")) as mine:
    stats, _ = run(lambda rank: WandbMetrics(mine))
    mine.log({"loss": 1.5})
print([(one.step, one.imbalance) for one in stats])
"""


@pytest.mark.full
def test_wandb_offline_run_holds_every_step(tmp_path):
    """A real offline run, read back from its folder record by record."""
    environment = {**os.environ, "WANDB_SILENT": "true", "PYTHONPATH": os.getcwd(), "WANDB_MODE": "offline"}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = list(wandb_rows(tmp_path))
    ours = [row for row in rows if "evenpack/imbalance" in row]
    assert str([(int(row["evenpack/step"]), row["evenpack/imbalance"]) for row in ours]) == result.stdout.strip()
    assert len(ours) == 3 and {f"evenpack/{name}" for name in ALWAYS} <= set(ours[0])
    assert [row["loss"] for row in rows if "loss" in row] == [1.5]


def wandb_rows(folder):
    """Yield the history of an offline run: protobuf records in the framing of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    [path] = glob.glob(str(folder / "wandb" / "offline-run-*" / "*.wandb"))
    for data in leveldb_records(Path(path).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): msgspec.json.decode(item.value_json) for item in items}


def leveldb_records(data):
    """Yield the records of a log in blocks of 32 KiB: (checksum, length, kind: whole, first, middle, last part)."""
    at, whole = 7, b""  # behind the file's own head
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # too small for a head
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield whole


def test_wandb_without_a_run_says_what_to_do(monkeypatch):
    import wandb

    monkeypatch.setattr(wandb, "run", None)
    with pytest.raises(RuntimeError, match=r"call wandb.init\(\) before the first step"):
        run(lambda rank: WandbMetrics())


def test_a_wandb_run_that_was_finished_is_a_warning_and_training_goes_on():
    from wandb.errors import UsageError

    class Finished:
        def define_metric(self, *_, **__):
            pass

        def log(self, *_, **__):
            raise UsageError("Run (x) is finished")

    with pytest.warns(RuntimeWarning, match="no more metrics are written, training goes on: Run .x. is finished") as caught:
        stats, _ = run(lambda rank: WandbMetrics(Finished()))
    assert len(stats) == 3 and len(caught) == 1


def test_prometheus_endpoint_is_scraped():
    """What a scraper reads over HTTP after the last step: sums in counters, the last step in gauges."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.parser import text_string_to_metric_families

    class Scraped(PrometheusMetrics):
        page = ""

        def close(self):
            if self.url:
                with urllib.request.urlopen(self.url, timeout=10) as answer:
                    type(self).page = answer.read().decode()
            super().close()

    registry = CollectorRegistry()
    stats, callback = run(lambda rank: Scraped(registry, port=0))
    assert callback.url is None and list(registry.collect()) == []
    found = {sample.name: sample.value for family in text_string_to_metric_families(Scraped.page) for sample in family.samples}
    assert found["evenpack_steps_total"] == 3 and found["evenpack_step"] == 2
    assert found["evenpack_moved_bytes_total"] == sum(one.moved_bytes for one in stats) > 0
    assert found["evenpack_tokens_total"] == sum(one.tokens for one in stats)
    assert found["evenpack_imbalance_ratio"] == stats[-1].imbalance
    assert found["evenpack_tokens_per_second"] == pytest.approx(stats[-1].tokens_per_second)
    assert found["evenpack_exposed_seconds_total"] == pytest.approx(sum(one.exposed_seconds for one in stats))


def test_two_schedulers_need_names_of_their_own():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    first, second = (PrometheusMetrics(registry) for _ in range(2))
    first.write(0, dict.fromkeys(COUNTERS, 1.0))
    with pytest.raises(ValueError, match="give each scheduler a namespace"):
        second.write(0, dict.fromkeys(COUNTERS, 1.0))


def test_a_port_that_is_taken_is_a_warning_and_training_goes_on():
    import socket

    from prometheus_client import CollectorRegistry

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.warns(RuntimeWarning, match="no more metrics are written, training goes on") as caught:
            stats, _ = run(lambda rank: PrometheusMetrics(CollectorRegistry(), port=port))
    assert len(stats) == 3 and len(caught) == 1


def test_all_ranks_write_where_asked():
    class Noted(Metrics):
        def __init__(self, rank):
            super().__init__(all_ranks=True)
            self.entries, noted[rank] = [], self

        def write(self, step, figures):
            self.entries.append(figures["evenpack/imbalance"])

    noted = {}
    stats, _ = run(Noted)
    assert noted[0].entries == noted[1].entries == [one.imbalance for one in stats]


def test_an_adapter_that_fails_warns_once():
    class Broken(Metrics):
        calls = 0

        def write(self, step, figures):
            Broken.calls += 1
            raise OSError("disk gone")

    with pytest.warns(RuntimeWarning, match="Broken: no more metrics are written, training goes on: disk gone") as caught:
        stats, _ = run(lambda rank: Broken())
    assert (len(stats), len(caught), Broken.calls) == (3, 1, 1)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TensorBoardMetrics(), ValueError, "give either log_dir or writer"),
        (lambda: TensorBoardMetrics("x", every=0), ValueError, "every must be an integer of at least 1, got 0"),
        (lambda: import_library("no_such_library"), ImportError, r"pip install 'evenpack\[metrics\]'"),
    ],
)
def test_wrong_settings(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_nothing_is_imported_before_it_is_used():
    code = (
        "import sys, evenpack.integrations.metrics as m; "
        "assert not {'wandb', 'tensorboard', 'prometheus_client'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
