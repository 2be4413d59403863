"""Every block of code in the documentation runs, and every command in it would start.

Sessions (`>>>`) run as doctests, page by page. Other blocks run in order, in one namespace per page, on two ranks over gloo;
what they use without defining it comes from `stage.py`. There is no list of pages to run: a new page is run, too.
"""

import contextlib
import doctest
import math
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evenpack.scheduler import PackingScheduler, SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from . import commands, stage
from .pages import PAGES, ROOT, blocks_of, commands_of

#: Languages that are no code: drawings and output, and settings of other programs.
PLAIN = ("", "text", "bash", "sh", "shell", "console", "yaml", "json", "toml")
#: Commands that are quick enough to be run as they stand.
QUICK = (
    "evenpack --version",
    "evenpack plan workload:image-text --ranks 8 --steps 2",
    "evenpack masks show conversation.json --processor path/to/processor",
)
RANKS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with everything that pages read."""
    folder = tmp_path_factory.mktemp("files")
    stage.write_files(folder)
    with contextlib.chdir(folder):
        stage.shared()
    return folder


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    """A fresh working folder with links to those files."""
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_blocks(page, blocks, rank, num_ranks):
    """Run a page's blocks on the calling rank; return what is left to check."""
    names = stage.namespace(page, rank, num_ranks)
    with names["stack"]:
        for block in blocks:
            try:
                exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
            except Exception as error:
                line = next(
                    one.lineno for one in reversed(traceback.extract_tb(error.__traceback__)) if one.filename == block.page
                )
                raise AssertionError(f"{block.page}:{line}: {type(error).__name__}: {error}") from error
        return CHECKS.get(page, lambda names: None)(names)


def pages_with(kind):
    return [page for page in PAGES if any(getattr(block, kind) for block in blocks_of(page))]


@pytest.mark.parametrize("page", pages_with("is_code"))
def test_code_runs(page, here):
    blocks = [block for block in blocks_of(page) if block.is_code]
    num_ranks = 1 if page in stage.SINGLE else RANKS
    found = run_ranks(lambda rank, size: run_blocks(page, blocks, rank, size), num_ranks, backend="gloo", timeout=200)
    assert all(one is None or one for one in found), found


@pytest.mark.parametrize("page", pages_with("is_session"))
def test_sessions_print_what_they_say(page, here):
    names = {}
    for block in blocks_of(page):
        if block.is_session:
            test = doctest.DocTestParser().get_doctest(block.text, names, page, page, block.line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            out = []
            runner.run(test, out=out.append, clear_globs=False)
            names = test.globs
            assert runner.failures == 0, "".join(out)


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_passed_over(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    found = blocks_of(page)
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), "a fence that is not closed"
    assert [block for block in found if not (block.is_code or block.is_session or block.language in PLAIN)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_commands_would_start(page):
    for words in commands_of(page):
        commands.check(words)


def test_quick_commands_run(here):
    shown = {" ".join(words) for page in PAGES for words in commands_of(page)}
    (here / "conversation.json").write_text(
        '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'
    )
    for command in QUICK:
        assert command in shown, "no page shows it any more"
        subprocess.run([sys.executable, "-m", *command.split()], check=True, capture_output=True, timeout=120)


def test_the_first_script_runs_as_it_is_started(here):
    page = "docs/quickstart.md"
    (script,) = [block.text for block in blocks_of(page) if 'if __name__ == "__main__"' in block.text]
    (started,) = [words for words in commands_of(page) if words[0] == "torchrun"]
    Path(started[-1]).write_text(script)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", *started[1:]]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"step (\d+): loss about ([\d.]+), imbalance ([\d.]+), ([\d.]+) without", done.stdout)
    assert [int(line[0]) for line in lines] == list(range(8)), done.stdout
    assert all(float(planned) <= float(home) for _, _, planned, home in lines)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nx = 1\nno_such_name\n```\n", "docs/planted.md:3: NameError"),
        ("text\n\n```python\nfrom evenpack.scheduler import NoSuch\n```\n", "docs/planted.md:4: ImportError"),
    ],
)
def test_a_broken_block_is_named(text, error, here):
    blocks = blocks_of("docs/planted.md", text)
    with pytest.raises(AssertionError, match=error):
        run_ranks(lambda rank, size: run_blocks("docs/planted.md", blocks, rank, size), 1, backend="gloo")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("make no-such-target", "No rule"),
        ("make demo DEMO_ARGS=--no-such", "knows no"),
        ("make demo NO_SUCH=1", "does not use"),
        ("torchrun --no-such train.py", "does not accept"),
        ("torchrun --nproc-per-node 2 examples/no_such.py", "no script"),
        ("torchrun --nproc-per-node 2 examples/ddp.py --no-such 1", "knows no"),
        ("evenpack plan x.jsonl --no-such", "does not accept"),
        ("pip install .[nosuch]", "no extra"),
        ("python -m benchmarks.no_such", "no module"),
    ],
)
def test_a_broken_command_is_refused(command, error):
    with pytest.raises(ValueError, match=error):
        commands.check(command.split())


def trained(names):
    """Steps were taken, by the optimizer that the page uses."""
    return stage.CountingSGD.num_steps >= 2 and all(p.isfinite().all() for p in names["model"].parameters())


def trained_by_the_trainer(names):
    """The first trainer of the page ran in it; TRL's, the last one, runs too."""
    names["trainer"].train()
    return names["trainer"].state.global_step == stage.MAX_STEPS


def quick_start(names):
    """The loader of the page feeds a scheduler; state and evaluation of the page work on it."""
    num_ranks = dist.get_world_size()
    config = SchedulerConfig(max_tokens=1024, samples_per_step=8)

    def opened():
        return PackingScheduler(names["loader"], config=config, adapter=names["encoder"].adapter)

    with opened() as names["scheduler"]:
        next(names["scheduler"])
        names["save"](".", 3)
        expected = [batch.input_ids.tolist() for batch in next(names["scheduler"])]
    with opened() as names["scheduler"]:
        dist.barrier()  # every rank reads the files of all
        assert names["load"](".", num_ranks) == 3
        resumed = [batch.input_ids.tolist() for batch in next(names["scheduler"])]
    loss = names["evaluate"](names["model"], names["loader"])
    return resumed == expected and math.isfinite(loss) and abs(loss - math.log(len(names["tokenizer"]))) < 2


def megatron(names):
    losses = [report["lm loss"] for report in names["losses"]]
    return bool(losses) and all(torch.isfinite(torch.as_tensor(loss)).all() for loss in losses)


CHECKS = {
    "README.md": trained,
    "docs/loops.md": lambda names: trained(names) and names["accelerator"].num_processes == RANKS,
    "docs/trainer.md": trained_by_the_trainer,
    "docs/quickstart.md": quick_start,
    "docs/megatron.md": megatron,
}
