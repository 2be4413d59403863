"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

from . import helpers

MODULES = ["attention", "next_fit", "source", "codec"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert helpers.VOCABULARY  # imports Megatron-Core, or skips
    module = importlib.import_module(f"evenpack.integrations.megatron.{name}")
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
