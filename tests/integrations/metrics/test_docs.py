"""The examples in the page on metrics run and print what they say, and its tables name what there is."""

import doctest
import re
from pathlib import Path

from evenpack.scheduler import StepStats, Summary

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 10 and result.failed == 0


def test_every_name_in_the_page_exists_and_every_figure_is_in_it():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| `StepStats`") : text.index("`Summary.of(stats)`")]
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    shares = {"padding_share", "padding_share_batched", "bubble"}
    counts = {"step", "num_microbatches", "num_dummy_packs", "padded_tokens", "padded_batch_tokens"}
    assert named - {"StepStats"} == set(StepStats.__struct_fields__) - counts | shares
    logged = set(re.findall(r"`evenpack/(\w+)`", text))
    assert logged and logged <= set(Summary.__struct_fields__)
