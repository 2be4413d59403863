"""The first start says that it compiles; one process of a node does, and a later start is silent."""

import os
import re
import subprocess
import sys

import numba
import pytest

from evenpack.scheduler import SchedulerConfig, warm

LAUNCHED = ("LOCAL_RANK", "SLURM_LOCALID")
START = """
from evenpack.scheduler import PackingScheduler, SchedulerConfig
PackingScheduler([], config=SchedulerConfig(max_tokens=8, samples_per_step=1), adapter="text").close()
"""


CONFIG = SchedulerConfig(max_tokens=8, samples_per_step=1)


@pytest.mark.parametrize(
    ("rank", "environment", "lines"),
    [
        (0, {}, 1),
        (1, {}, 0),
        (8, {"LOCAL_RANK": "0"}, 1),
        (0, {"LOCAL_RANK": "1"}, 0),
        (3, {"SLURM_LOCALID": "0"}, 1),
        (0, {"SLURM_LOCALID": "2"}, 0),
    ],
)
def test_the_first_rank_of_a_node_tells_once(rank, environment, lines, monkeypatch, capsys):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def compile_two(config, **_):
        """Compile two functions that no cache holds."""
        for _ in range(2):
            numba.njit(lambda value: value + 1)(1)

    for _ in range(2):  # the second time nothing is left to compile
        warm.warm_up_once(rank, CONFIG, warm=compile_two)
    told = re.sub(r"in \d+ s", "in N s", capsys.readouterr().err).splitlines()
    assert told == [warm.TEXT, "evenpack: compiled in N s"] * lines


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, [("step", "minimal", 2, False)]),
        ({"sync": "microbatch", "movement": "free"}, [("microbatch", "free", 2, False)]),
        ({"transport": "device"}, [("step", "minimal", 2, True)]),
        ({"scope": "rank"}, [("step", "minimal", 2, True)]),
        ({"scope": "microbatch", "samples_per_step": None, "num_microbatches": 2}, []),
    ],
)
def test_only_what_the_settings_need_is_compiled(settings, needed):
    asked = []

    def note(config, *, num_phases, has_peers):
        asked.append((config.sync, config.movement, num_phases, has_peers))

    config = SchedulerConfig(**{"max_tokens": 8, "samples_per_step": 1, **settings})
    warm.warm_up_once(0, config, num_phases=3, warm=note)
    assert asked == needed


def test_what_is_loaded_is_not_told_of():
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr  # compiled and kept before the tests began


def test_a_scheduler_without_a_cache_tells_before_it_compiles(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    started = subprocess.Popen(
        [sys.executable, "-c", START], env={**environment, "NUMBA_CACHE_DIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert started.stderr is not None and started.stderr.readline() == f"{warm.TEXT}\n"
    finally:
        started.kill()
        started.wait()
        started.stderr.close()
