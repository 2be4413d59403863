"""The examples in the pages on datasets and masks run and print what they say."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", ["datasets.md", "masks.md"])
def test_page(name):
    result = doctest.testfile(str(DOCS / name), module_relative=False)
    assert result.attempted > 0 and result.failed == 0


def test_the_page_on_masks_lists_every_preset():
    from evenpack.collate.masks import PRESETS

    page = (DOCS / "masks.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"| `{name}`" not in page] == []
