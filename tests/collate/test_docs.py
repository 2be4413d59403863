"""Every example in the package's docstrings and in the page on packs runs and prints what it says."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import evenpack.collate

MODULES = [info.name for info in pkgutil.walk_packages(evenpack.collate.__path__, "evenpack.collate.")]
PAGE = Path(__file__).parents[2] / "docs" / "packs.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_page():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
