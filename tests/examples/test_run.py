"""The command that starts the demo, and the whole of it in two steps on two ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from demo.progress import StepRecord
from demo.run import free_port, main, make_parser

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "run.py"


def test_options():
    options = make_parser().parse_args([])
    assert (options.ranks, options.seed, options.model, options.out) == (2, 0, "qwen2_5_vl", Path("runs/demo"))
    assert make_parser().parse_args(["--steps", "30", "--model", "qwen3_vl"]).steps == 30


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--steps", "-1"], ["--model", "gpt2"], ["--what"]])
def test_wrong_options_start_nothing(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_free_port_can_be_listened_on():
    with socket.create_server(("127.0.0.1", free_port())):
        pass


@pytest.mark.full
def test_two_steps_on_two_ranks(tmp_path):
    command = [sys.executable, str(SCRIPT), "--steps", "2", "--out", str(tmp_path / "demo")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal up to rounding" in done.stdout
    assert "Warning" not in done.stderr
    lines = (tmp_path / "demo" / "steps.jsonl").read_text().splitlines()
    records = [StepRecord(**json.loads(line)) for line in lines]
    assert [record.step for record in records] == [1, 2]
    assert all(len(record.loads) == len(record.loads_home) == 2 for record in records)
    assert all(record.tokens <= record.padded_tokens <= record.padded_batch_tokens for record in records)
    assert all(0 <= record.moved_bytes <= record.shuffle_bytes for record in records)
    assert {file.name for file in (tmp_path / "demo").glob("*.png")} == {"loss.png", "loads.png"}
