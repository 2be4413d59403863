"""Examples in docstrings and in the planner's page run as written."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

MODULES = ["table", "planner", "assignment", "bounds", "integers", "two_level.sharing", "two_level.pods"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"evenpack.scheduler.plan.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_page_examples(capsys):
    page = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        expected = re.findall(r"^# (.*)$", block, re.M)
        exec(block, {})
        assert capsys.readouterr().out.splitlines() == expected
