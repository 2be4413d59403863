"""Fifty conversations a format: what trains, decoded, is the assistant's text with its end-of-turn token, and nothing else."""

import pytest

from evenpack.collate import SampleEncoder
from evenpack.models import adapter_for

from .chat_examples import conversations, trained_text
from .chat_formats import CHATML, TAGGED, TEMPLATES, with_template

COUNT = 50


def encoder(template, strategies=("template", "prefix", "search"), **settings):
    tokenizer = with_template(template, **settings)
    return SampleEncoder(tokenizer, adapter_for("text"), strategies=strategies, on_empty_mask="keep")


def trained(one, example):
    sample = one.encode(example)
    labels = sample["labels"]
    return one.tokenizer.decode(labels[labels != -100]), sample["mask_strategy"]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_trains_is_what_the_assistant_writes(name, trim_offsets):
    one = encoder(TEMPLATES[name], trim_offsets=trim_offsets)
    assert one.preset.name == name
    for example in conversations(name, COUNT):
        text, strategy = trained(one, example)
        assert strategy in ("prefix", "search")
        assert text == trained_text(name, example["messages"])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("strategy", ["prefix", "search"])
def test_each_strategy_alone_agrees_where_it_applies(name, strategy):
    one = encoder(TEMPLATES[name], (strategy,), thinking_tokens=True)
    found = [trained(one, example) for example in conversations(name, COUNT)]
    for example, (text, used) in zip(conversations(name, COUNT), found, strict=True):
        assert text == (trained_text(name, example["messages"]) if used == strategy else "")
    applied = sum(used == strategy for _, used in found)
    # ChatML and Gemma 4 strip thinking from earlier turns, Mistral writes the tools before the last question: a
    # conversation cut short renders differently there.
    assert applied >= (COUNT // 4 if strategy == "prefix" and name in ("chatml", "gemma4", "mistral") else COUNT)


def test_the_generation_tag_agrees_with_the_others():
    tagged, plain = encoder(TAGGED, ("template",)), encoder(CHATML)
    assert TAGGED.count("generation") == 2
    for example in conversations("tagged", COUNT):
        text, used = trained(tagged, example)
        assert used == "template"
        assert text == trained(plain, example)[0] == trained_text("chatml", example["messages"])
