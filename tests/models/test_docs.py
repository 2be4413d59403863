"""The examples of the page on model families, and of the docstrings, run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import evenpack.models
from evenpack.models.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"


def test_examples_run():
    names: dict = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(block, names)
        with pytest.raises(ValueError, match=r"known already: \['my_vl'\]"):
            names["register_family"](FAMILIES["my_vl"])
    finally:
        FAMILIES.pop("my_vl", None)  # registered by the page
    assert "advantages" in names["adapter"].fields


def test_every_family_is_on_the_page():
    page = PAGE.read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page and f'"{name}"' not in page] == []


@pytest.mark.parametrize("name", [info.name for info in pkgutil.walk_packages(evenpack.models.__path__, "evenpack.models.")])
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
