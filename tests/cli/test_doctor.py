"""`evenpack doctor`: alone, under torchrun, and where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from evenpack.cli.doctor import group, local
from evenpack.cli.doctor.finding import Examined, Finding, as_text, merge
from evenpack.cli.main import run
from evenpack.scheduler import ProcessGroups, SchedulerConfig
from evenpack.scheduler.comm.channel import open_channel
from evenpack.scheduler.testing import run_ranks

from ..collate.test_isolation import built

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
GIB = 2**30


def torchrun(*arguments, num_ranks=2, timeout=200):
    """Run on real ranks; return the exit code of the job, and the last line of each kind of output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *arguments]
    return subprocess.run(launch, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout, check=False)


def by_name(out):
    """Return the findings of JSON output by their name."""
    shown = json.loads(out[out.index("{\n") : out.rindex("}") + 1])
    return shown, {found["name"]: found for found in shown["findings"]}


def test_torchrun_on_two_ranks_finds_nothing_wrong():
    """Real processes over gloo: the command itself, as a user starts it."""
    result = torchrun("-m", "evenpack", "doctor", "--json", "--megabytes", "1", "--cp", "2")
    assert result.returncode == 0, result.stderr[-3000:]
    shown, found = by_name(result.stdout)
    assert shown["fine"] and shown["num_ranks"] == 2 and result.stdout.count('"fine"') == 1
    assert found["alignment"]["figures"] == {"align": 4, "pack_align": 4}
    assert found["group"]["figures"] == {"num_ranks": 2, "nodes": 1, "transport": "host"}
    assert all(found[name]["level"] == "ok" for name in ("versions", "agreement", "wire", "clocks", "numba cache"))
    assert all(found[name]["ranks"] == [0, 1] for name in ("agreement", "wire", "clocks", "gather", "exchange"))
    assert found["clocks"]["figures"]["skew_seconds"] < 1
    exchange = found["exchange"]["figures"]
    assert exchange["bytes_per_second"] > 0 and exchange["bare_bytes_per_second"] > 0 and 0.9e6 < exchange["bytes"] < 1.1e6


@pytest.mark.parametrize(
    ("plant", "name", "level", "text", "fix"),
    [
        ("version", "agreement", "wrong", "rank 1 differs from rank 0: evenpack is '0.0.1', not '0.1.0'", "same version"),
        pytest.param("library", "agreement", "note", "rank 1 differs from rank 0: numba 0.1 not ", "", marks=pytest.mark.full),
        pytest.param("clock", "clocks", "wrong", "clocks differ by 30.", "chrony", marks=pytest.mark.full),
        pytest.param("wire", "wire", "wrong", "CorruptBlockError", "--transport host", marks=pytest.mark.full),
    ],
)
def test_what_is_wrong_on_one_rank_is_found_by_all(plant, name, level, text, fix):
    """The exit code of every rank says so, the first rank prints it once, and nobody hangs."""
    result = torchrun(str(Path(__file__).with_name("doctor_job.py")), plant, "--json")
    shown, _ = by_name(result.stdout)
    [found] = [one for one in shown["findings"] if one["name"] == name and one["level"] != "ok" and 1 in one["ranks"]]
    assert found["level"] == level and text in found["text"] and fix in found["fix"], found
    assert shown["fine"] == (level != "wrong") == (result.returncode == 0)
    if plant == "wire":
        [other] = [one for one in shown["findings"] if one["name"] == name and one["ranks"] == [0]]
        assert other["text"] == "rank 1 could not read the sample that it got from here"


def test_a_rank_that_does_not_come_is_told():
    """The rank that is left says what it knows, within its time."""
    job = str(Path(__file__).with_name("doctor_job.py"))
    result = torchrun(job, "dead", "--timeout", "5")
    assert result.returncode == 1 and "WRONG  group" in result.stdout and "are all ranks started" in result.stdout


def test_alone(capsys):
    """One process, in text: the alignment that was asked for, and versions of what is installed."""
    arguments = ["doctor", "--cp", "4", "--tp", "8", "--sequence-parallel", "--fp8", "blockwise", "--max-tokens", "8192"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "cp 4, tp 8 with sequence parallelism, FP8 blockwise: align=64, pack_align=4096" in out
    assert f"torch {__import__('torch').__version__}" in out and out.endswith("1 rank: all is fine\n")


def test_a_wrong_finding_is_the_exit_code(capsys):
    assert run(["doctor", "--fp8", "blockwise", "--max-tokens", "100"]) == 1
    out = capsys.readouterr().out
    assert "WRONG  alignment" in out and "-> max_tokens of at least 128" in out and "1 finding is wrong" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cp", "0"], "--cp must be an integer of at least 1, got 0"),
        (["--megabytes", "0"], "--megabytes must be a number from 0.01"),
        (["--timeout", "nan"], "--timeout must be a number"),
        (["--max-tokens", "-5"], "--max-tokens must be an integer"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, text):
    assert run(["doctor", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("evenpack doctor: ") and text in err and err.count("\n") == 1


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        run(["doctor", "--help"])
    assert ended.value.code == 0 and "torchrun --nproc-per-node 8 -m evenpack doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "level", "text", "fix"),
    [
        (dict(cp=1, tp=1, fp8=None), "ok", "align=1, pack_align=1", ""),
        (dict(cp=4, tp=8, fp8="blockwise"), "ok", "align=8, pack_align=512", ""),
        (dict(cp=2, tp=1, fp8="mxfp8", max_tokens=1000), "note", "of which 16 can never be used", "max_tokens=992,"),
        (dict(cp=2, tp=1, fp8="blockwise", max_tokens=100), "wrong", "a pack holds 200 tokens", "max_tokens of at least 128"),
    ],
)
def test_alignment(layout, level, text, fix):
    found = local.check_alignment(**{"sequence_parallel": False, **layout})
    assert found.level == level and text in found.text and fix in found.fix, found


@pytest.mark.parametrize(
    ("free", "shared", "ranks", "level", "text"),
    [
        (64 * GIB, 32 * GIB, 8, "ok", "64.0 GiB of host memory are free, 8.0 GiB a rank"),
        (8 * GIB, 32 * GIB, 8, "wrong", "1.0 GiB a rank"),
        (64 * GIB, 64 << 20, 1, "note", "only 0.1 GiB of shared memory"),
        (None, None, 1, "note", "not known"),
    ],
)
def test_memory(free, shared, ranks, level, text):
    found = local.check_memory(free, shared, ranks)
    assert found.level == level and text in found.text


def test_samples_in_view_need_room():
    found = local.check_memory(64 * GIB, None, 8, held=2 * GIB)
    assert found.level == "ok" and "samples in view take 2.0 GiB of it" in found.text
    found = local.check_memory(64 * GIB, None, 8, held=8 * GIB)
    assert found.level == "wrong" and "a smaller lookahead" in found.fix


def test_free_memory_is_that_of_this_machine():
    available, shared = local.free_memory()
    assert 1 << 20 < available < 1 << 46 and 0 < shared < 1 << 46


def test_a_cache_that_cannot_be_written_is_wrong(tmp_path):
    """A folder that even root cannot write to: it would have to lie below a file."""
    (tmp_path / "file").write_text("x")
    found = local.check_cache(tmp_path / "file" / "cache")
    assert found.level == "wrong" and "NUMBA_CACHE_DIR" in found.fix
    assert found.text.startswith(f"{tmp_path / 'file' / 'cache'}, for the compiled planner, cannot be written")


def test_no_cache_at_all_is_found_in_a_real_process():
    """Numba finds no folder that it may write to: the planner compiles at every start, and the doctor says so."""
    code = (
        "from numba.core import caching; caching.CacheImpl._locator_classes = []\n"
        "from evenpack.cli.doctor import local\n"
        "print(local.check_cache(local.cache_folder()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "level='wrong'" in out and "no folder for the compiled planner can be written: every start compiles it again" in out


@pytest.mark.parametrize("writable", [True, False])
def test_a_cache_folder_that_numba_ignores_is_told(writable, tmp_path):
    """Numba takes its next choice without a word where NUMBA_CACHE_DIR cannot be written (here it lies below a file)."""
    (tmp_path / "file").write_text("x")
    asked = tmp_path / ("folder" if writable else "file") / "cache"
    code = (
        "from evenpack.cli.doctor import local\n"
        "folder = local.cache_folder()\n"
        "print(folder, local.check_cache(folder), sep='\\n')"
    )
    environment = {**ENVIRONMENT, "NUMBA_CACHE_DIR": str(asked)}
    if writable:  # without compiling what would be written
        code = "from evenpack.scheduler import plan; plan.warm_up = lambda: None\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    folder, finding = done.stdout.splitlines()
    if writable:
        assert folder.startswith(f"{asked}/") and "level='ok'" in finding and f"is there: {asked}/" in finding
    else:
        assert "level='note'" in finding and "fix='set NUMBA_CACHE_DIR to a folder" in finding, finding
        assert (
            f"NUMBA_CACHE_DIR={asked} cannot be written, and numba ignores it: the compiled planner goes to {folder}" in finding
        )


def test_more_ranks_than_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = local.check_backends()
    assert (found.level, found.fix) == ("wrong", "--nproc-per-node 4") and "4 CUDA devices, and 8 ranks" in found.text


@pytest.mark.parametrize(
    ("nodes", "variable", "address", "level"),
    [
        (1, None, "127.0.1.1", None),
        (2, "eth0", "127.0.1.1", None),
        (2, None, "127.0.1.1", "wrong"),
        (2, None, "10.0.0.7", "ok"),
    ],
)
def test_interface(monkeypatch, nodes, variable, address, level):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if variable:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    monkeypatch.setattr("socket.gethostbyname", lambda name: address)
    found = local.check_interface(nodes)
    assert (found and found.level) == level


@pytest.mark.parametrize("transport", ["host", "device"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_wire_on_simulated_ranks(num_ranks, transport):
    def fn(rank, num_ranks):
        config = SchedulerConfig(max_tokens=8, samples_per_step=1, timeout=20.0, transport=transport)
        channel = open_channel(ProcessGroups.from_world(), config)
        try:
            return [group.check_wire(channel), group.check_agreement(channel.steps), group.check_clocks(channel.steps)]
        finally:
            channel.close()

    assert {found.level for findings in run_ranks(fn, num_ranks) for found in findings} == {"ok"}


def test_a_field_that_comes_back_changed_is_named(monkeypatch):
    """A change that no checksum covers, since it was made before the block was written."""
    shift = group.shift

    def changing(exchanger, transport, sample, places):
        arrived = shift(exchanger, transport, sample, places)
        pixels = arrived.values["pixel_values"].clone()
        pixels[3, 5] += 1
        return msgspec.structs.replace(arrived, values={**arrived.values, "pixel_values": pixels}, sample_id="other")

    monkeypatch.setattr(group, "shift", changing)
    channel = open_channel(ProcessGroups(), SchedulerConfig(max_tokens=8, samples_per_step=1))
    found = group.check_wire(channel)
    assert found.level == "wrong" and "['pixel_values', 'sample_id'] came back changed" in found.text


def test_findings_of_many_ranks_are_merged():
    fine, slow = Finding(name="wire", text="fine"), Finding(name="wire", level="wrong", text="broken", fix="mend it")
    seen = merge({rank: [Finding(name="a", text="b"), slow if rank in (1, 2, 6) else fine] for rank in range(8)})
    lines = as_text(Examined(num_ranks=8, prints=True, findings=seen)).splitlines()
    assert lines == [
        "ok     a     b",
        "ok     wire  fine (rank 0, 3-5, 7)",
        "WRONG  wire  broken (rank 1-2, 6)",
        "             -> mend it",
        "",
        "8 ranks: 1 finding is wrong",
    ]


def test_memory_that_cannot_be_pinned(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.empty", refused)
    found = local.check_pinned()
    assert found.level == "wrong" and "ulimit -l" in found.fix


def test_a_saved_model_is_run_in_packs(tmp_path, capsys):
    """A tiny Qwen2.5-VL is fine; a folder without a model is not."""
    model, adapter, processor = built("qwen2_5_vl", torch.float32)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert run(["doctor", "--json", "--model", str(tmp_path)]) == 0
    found = by_name(capsys.readouterr().out)[1]["model"]
    assert found["level"] == "ok" and found["figures"]["family"] == adapter.name and found["figures"]["change"] < 1e-5
    assert "samples of its processor in a pack equal those alone" in found["text"]
    assert run(["doctor", "--json", "--model", str(tmp_path / "none")]) == 1
    assert "no folder" in by_name(capsys.readouterr().out)[1]["model"]["text"]


def test_a_model_is_run_by_one_process(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["doctor", "--model", str(tmp_path)]) == 1
    assert "without torchrun" in capsys.readouterr().err
