"""Errors of the commands name flags, never arguments of functions that a flag sets."""

import argparse
import inspect
import json
import re

import pytest

from evenpack.cli.main import build_parser, flags_of, run, with_flags
from evenpack.collate import SampleEncoder
from evenpack.collate.encoding.settings import EncoderConfig
from evenpack.models.cost import coefficients_from_config
from evenpack.scheduler import OfflineIndex, SchedulerConfig
from evenpack.scheduler.plan import PlanConfig

from ..collate.masks.chat_formats import CHATML, with_template

FLAGS = {
    name: "--" + name.replace("_", "-") for name in ("max_tokens", "align", "min_pixels", "max_pixels", "tolerance", "chunk")
}
FLAGS |= {"num_ranks": "--ranks", "ignored": "--ignore"}
COMMANDS = [["masks", "show"], ["index", "build"], ["index", "show"], ["plan"], ["report"], ["doctor"]]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_tokens=8 is below align=16: no", "--max-tokens 8 is below --align 16: no"),
        ("give min_pixels and max_pixels: images", "give --min-pixels and --max-pixels: images"),
        ("tolerance must be a number", "--tolerance must be a number"),
        ("num_ranks must be at least 1, got 0", "--ranks must be at least 1, got 0"),
        ("parts of another index (chunk was 10, is 20)", "parts of another index (--chunk was 10, is 20)"),
        ("leave it out by SampleEncoder(..., ignored=('source',))", "leave it out by --ignore source"),
        ("align it: the ranks align by max_tokens", "align it: the ranks align by --max-tokens"),
        ("no file a/max_tokens.jsonl, column 'max_tokens'", "no file a/max_tokens.jsonl, column 'max_tokens'"),
    ],
)
def test_settings_become_flags(text, shown):
    assert with_flags(text, FLAGS) == shown


def parser_of(command):
    parser = build_parser()
    for word in command:
        [subparsers] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser = subparsers.choices[word]
    return parser


#: Options that set an argument of one of the functions that the commands call, by another name than the flag's.
RENAMED = {
    "--ranks": "num_ranks",
    "--cp": "cp_size",
    "--tp": "tp_size",
    "--ignore": "ignored",
    "--strategy": "strategies",
    "--images": "folder",
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_is_stored_under_the_name_of_its_setting(command):
    """So that an error of what the commands call can be translated: a flag of another name says so in the parser."""
    functions = (SampleEncoder, OfflineIndex.build, coefficients_from_config)
    settings = {name for function in functions for name in inspect.signature(function).parameters}
    settings |= {name for config in (EncoderConfig, PlanConfig, SchedulerConfig) for name in config.__struct_fields__}
    settings |= set(RENAMED.values())
    flags = flags_of(parser_of(command), argparse.Namespace())
    for name, flag in flags.items():
        assert name == RENAMED.get(flag, flag[2:].replace("-", "_"))
        if name in settings:
            for text in (f"{name}=7 is wrong", f"{name} must be at least 1", f"{name} was 3, is 4"):
                assert with_flags(text, flags).startswith(flag + " "), text


@pytest.fixture
def given(tmp_path):
    """Working arguments of each command, which a wrong option is added to."""
    with_template(CHATML).save_pretrained(tmp_path / "tokenizer")
    message = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps({**message, "source": "web"}) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps(message) + "\n")
    (tmp_path / "lengths.txt").write_text("7\n" * 50)
    processor = ["--processor", str(tmp_path / "tokenizer")]
    build = ["index", "build", str(tmp_path / "data.jsonl"), *processor, "--quiet"]
    assert run([*build, "--out", str(tmp_path / "index"), "--ignore", "source"]) == 0
    return {
        "masks show": ["masks", "show", str(tmp_path / "c.jsonl"), *processor],
        "index build": [*build, "--out", str(tmp_path / "other")],
        "index show": ["index", "show", str(tmp_path / "index")],
        "plan": ["plan", str(tmp_path / "lengths.txt"), "--ranks", "2", "--max-tokens", "8"],
        "report": ["report", str(tmp_path)],
        "doctor": ["doctor"],
    }


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_number_out_of_range_is_told_by_its_flag(command, given, capsys):
    flags = flags_of(parser_of(command), argparse.Namespace())
    numbers = [action for action in parser_of(command)._actions if action.type in (int, float)]
    assert numbers or command == ["report"]
    for action in numbers:
        flag = flags[action.dest]
        more = ["--ignore", "source"] if command[-1] == "build" else []
        assert run([*given[" ".join(command)], *more, f"{flag}=-3"]) == 1, flag
        err = capsys.readouterr().err
        assert flag in err and "-3" in err and err.count("\n") == 1, err
        for name in flags:
            assert not re.search(rf"(?<![\w./-]){name}(=| must)", err), err


def test_what_only_the_data_show_is_told_by_flags(given, capsys):
    build = given["index build"]
    assert run(build) == 1
    assert capsys.readouterr().err.endswith("or leave it out by --ignore source\n")
    assert run([*given["index build"], "--ignore", "source", "--min-pixels", "3"]) == 1
    assert "give both --min-pixels and --max-pixels" in capsys.readouterr().err
