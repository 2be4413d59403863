"""`evenpack masks show` and `evenpack index build/show`, from saved processors and files to what is printed."""

import json
import random

import numpy as np
import pytest

from evenpack.cli.main import run
from evenpack.models import adapter_for
from evenpack.scheduler import OfflineConfig, OfflineIndex

from ..collate.encoding import tiny
from ..collate.masks.chat_formats import CHATML, with_template

MESSAGES = [
    {"role": "user", "content": "Say <|im_end|>"},
    {"role": "assistant", "content": "Yes", "weight": 0.5},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "No", "reasoning_content": "hm"},
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    with_template(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory):
    """A processor as a checkpoint holds it, and a config with the small vocabulary's ids."""
    from transformers import Qwen2_5_VLConfig

    folder = tmp_path_factory.mktemp("processor")
    tiny.processor().save_pretrained(folder)
    media = tiny.adapter().media_tokens
    config = Qwen2_5_VLConfig(image_token_id=media["image"], video_token_id=media["video"])
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng, lines = random.Random(0), []
    for number in range(12):
        tiny.picture(rng).save(folder / f"{number}.png")
        content = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "What?"}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat"}]
        lines.append(json.dumps({"messages": messages, "sample_id": number, "source": "web"}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def test_masks_show_is_plain_where_there_is_no_terminal(tokenizer_folder, tmp_path, capsys):
    (tmp_path / "c.json").write_text(json.dumps(MESSAGES))
    assert run(["masks", "show", str(tmp_path / "c.json"), "--processor", str(tokenizer_folder)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "<|im_start|>user",
        "Say <|im_end|><|im_end|>",
        "<|im_start|>assistant",
        "⟦0.5:Yes<|im_end|>⟧",
        "<|im_start|>user",
        "Why?<|im_end|>",
        "<|im_start|>assistant",
        "⟦<think>",
        "hm",
        "</think>",
        "",
        "No<|im_end|>⟧",
        "",
        "",
        "24 of 73 tokens train; format chatml, found by: search",
    ]


def test_masks_show_in_colour_and_by_one_strategy(tokenizer_folder, tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": MESSAGES[:2]}) + "\n" + json.dumps({"messages": MESSAGES}))
    arguments = ["masks", "show", str(tmp_path / "c.jsonl"), "--processor", str(tokenizer_folder), "--color", "always"]
    assert run([*arguments, "--example", "1", "--strategy", "prefix"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[32m" not in out and "\x1b[2m" in out and "found by: none" in out
    assert run([*arguments, "--strategy", "search"]) == 0
    assert "\x1b[32m0.5:Yes<|im_end|>\x1b[0m" in capsys.readouterr().out
    assert run([*arguments, "--example", "2"]) == 1
    assert "has 2 examples: --example must be from 0 to 1, got 2" in capsys.readouterr().err


def test_a_refused_conversation_is_one_line(tokenizer_folder, tmp_path, capsys):
    (tmp_path / "c.json").write_text("[]")
    assert run(["masks", "show", str(tmp_path / "c.json"), "--processor", str(tokenizer_folder)]) == 1
    assert capsys.readouterr().err == "evenpack masks: example 0: 'messages' must be a list of messages, got list []\n"


def index_arguments(dataset, processor_folder, out, *more):
    return [
        "index", "build", str(dataset), "--out", str(out), "--processor", str(processor_folder),
        "--model", str(processor_folder),        "--min-pixels", "3136", "--max-pixels", "50000", "--ignore", "source", *more,
    ]  # fmt: skip


def test_index_build_and_show(dataset, processor_folder, tmp_path, capsys):
    assert run(index_arguments(dataset, processor_folder, tmp_path / "index", "--workers", "2", "--chunk", "5")) == 0
    out, err = capsys.readouterr()
    assert "examples  12\n" in out and "media     12\n" in out and "12/12" in err
    assert run(["index", "show", str(tmp_path / "index"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"] == {"adapter": "qwen2_5_vl", "min_pixels": 3136, "max_pixels": 50000, "max_length": None}
    encoder = tiny.encoder(ignored=("source",))
    lines = [json.loads(line) for line in dataset.read_text().splitlines()]
    encoder._folder = dataset.parent
    assert shown["tokens"] == sum(len(encoder.encode(line)["input_ids"]) for line in lines)
    assert (
        run(["index", "show", str(tmp_path / "index"), "--ranks", "2", "--samples-per-step", "3", "--max-tokens", "512"]) == 0
    )
    assert "plan      dropped 0, full steps 2, simulated 32, packs 2, filled 0.2271, imbalance " in capsys.readouterr().out
    assert run(["index", "show", str(tmp_path / "index"), "--ranks", "2", "--max-tokens", "20"]) == 1
    assert "12 of 12 samples are longer than a pack's 20 tokens" in capsys.readouterr().err
    assert run(["index", "show", str(tmp_path / "index"), "--max-tokens", "0"]) == 1
    assert "--max-tokens must be an integer of at least 1, got 0" in capsys.readouterr().err


def test_images_need_a_family_that_says_how_they_count(dataset, processor_folder, tmp_path, capsys):
    """Without --model and --adapter the family is text: an image would count by its placeholder, or by its patches."""
    arguments = index_arguments(dataset, processor_folder, tmp_path / "index", "--quiet")
    at = arguments.index("--model")
    for command in (
        [*arguments[:at], *arguments[at + 2 :]],
        ["masks", "show", str(dataset), "--processor", str(processor_folder)],
    ):
        assert run(command) == 1
        err = capsys.readouterr().err
        assert "1 image items, but the family 'text' has no image" in err and "--model or --adapter" in err, err
    tokenizer, processor = tiny.processor().tokenizer, tiny.processor()
    tokenizer.chat_template = processor.chat_template
    tokenizer.save_pretrained(tmp_path / "tokenizer")  # alone it would leave the image's placeholder as it is
    assert (
        run(["masks", "show", str(dataset), "--processor", str(tmp_path / "tokenizer"), "--model", str(processor_folder)]) == 1
    )
    assert "has no image_processor" in capsys.readouterr().err


def test_an_index_of_other_settings_is_refused(dataset, processor_folder, tmp_path, capsys):
    assert run(index_arguments(dataset, processor_folder, tmp_path, "--quiet")) == 0
    arguments = index_arguments(dataset, processor_folder, tmp_path)
    arguments[arguments.index("50000")] = "60000"
    assert run(arguments) == 1
    assert "--max-pixels was 50000, is 60000" in capsys.readouterr().err
    assert run(["index", "show", str(tmp_path / "none")]) == 1
    assert "no offline index" in capsys.readouterr().err


LENGTHS = np.random.default_rng(4).integers(5, 140, 75)


@pytest.fixture(scope="module")
def words_index(tokenizer_folder, tmp_path_factory):
    """An index of samples of very different lengths, two of which the build leaves out."""
    folder = tmp_path_factory.mktemp("words")
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "a " * length}, {"role": "assistant", "content": "b"}]})
        for length in (*LENGTHS, 400, 500)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines))
    arguments = ["--processor", str(tokenizer_folder), "--out", str(folder / "index"), "--quiet", "--max-length", "400"]
    assert run(["index", "build", str(folder / "data.jsonl"), *arguments]) == 0
    return folder / "index"


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("share", [0.6, 1])
def test_an_index_and_a_plan_of_it_have_the_same_figures(sync, num_ranks, share, words_index, capsys):
    """With and without samples that are too long; 75 samples, or three fifths of them, fill no whole number of steps."""
    index = OfflineIndex(words_index)
    tokens = index.tokens(np.arange(len(index)))
    fits = tokens[tokens > 0]
    limit = int(np.quantile(fits, share, method="lower"))
    kept = int((fits <= limit).sum())
    arguments = ["--ranks", num_ranks, "--samples-per-step", 4, "--max-tokens", limit, "--sync", sync, "--json"]
    assert run(["index", "show", str(words_index), *map(str, arguments)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["left out"]["too long"] == 2
    assert run(["plan", str(words_index), "--no-advice", *map(str, arguments)]) == 0
    planned = json.loads(capsys.readouterr().out)
    ours, plan = planned["methods"][0], shown["plan"]
    assert plan["imbalance"] == ours["imbalance"] and plan["packs"] == ours["num_microbatches"] * num_ranks
    assert plan["dropped"] == planned["samples"]["dropped"] == len(fits) - kept
    assert plan["simulated"] == planned["setting"]["steps"]
    assert (plan["full steps"], plan["last step"]["samples"]) == divmod(kept, 4 * num_ranks)

    # The planner of an index cuts the same steps. It keeps nothing at home, as `--movement free` does.
    config = OfflineConfig(max_tokens=limit, samples_per_step=4, sync=sync, oversize="drop")
    steps = list(index.planner(config, adapter_for("text"), num_ranks=num_ranks).steps(epoch=0))
    full = [step.plan for step in steps if not step.is_partial]
    arguments = [*map(str, arguments), "--movement", "free", "--steps", str(len(full))]
    assert run(["plan", str(words_index), "--no-advice", *arguments]) == 0
    freely = json.loads(capsys.readouterr().out)["methods"][0]
    assert freely["step_cost"] == np.mean([plan.value for plan in full])
    assert freely["num_microbatches"] == np.mean([plan.num_microbatches for plan in full])
    assert [len(step.samples) for step in steps if step.is_partial] == [plan["last step"]["samples"]]


def test_a_last_step_alone_has_no_mean(words_index, capsys):
    assert run(["index", "show", str(words_index), "--ranks", "5", "--samples-per-step", "20", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["full steps"] == 0 and plan["last step"]["samples"] == 75 and "imbalance" not in plan
    assert run(["index", "show", str(words_index), "--ranks", "5", "--samples-per-step", "15"]) == 0
    assert "last step" not in capsys.readouterr().out
