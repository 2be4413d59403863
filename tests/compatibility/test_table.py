"""The table of versions: rows replace those of the same versions, the page is what the record says, failures show."""

import pytest

from . import table
from .__main__ import lowest, outcome
from .checks import CHECKS, NotInstalled

ROW = {"versions": {"python": "3.11.1", "torch": "2.9.0"}, "evenpack": "0.1.0", "checks": {"plan": "ok"}}


def test_the_page_is_what_the_record_says():
    rows = table.read()
    assert rows and table.PAGE.read_text(encoding="utf-8") == table.render(rows, lowest())
    assert all(row["checks"].keys() == CHECKS.keys() for row in rows)


def test_a_row_replaces_that_of_its_versions():
    failed = ROW | {"checks": {"plan": "ValueError: no"}}
    other = ROW | {"versions": {"python": "3.12.1", "torch": "2.9.0"}}
    assert table.updated([ROW, other], failed) == [failed, other]
    assert table.updated([ROW], other) == [ROW, other]


def test_what_was_not_tested_says_so():
    page = table.render([ROW], {"torch": "2.6", "python": "3.11"})
    assert "| torch | 2.6 (declared, not tested) | 2.9.0 |" in page and "| python | 3.11 | 3.11.1 |" in page


@pytest.mark.parametrize(
    ("error", "cell"),
    [(NotInstalled("x"), "-"), (ValueError("two\nlines"), "ValueError: two"), (AssertionError(), "AssertionError: ")],
)
def test_a_failing_check_is_in_its_cell(error, cell, monkeypatch):
    def fail():
        raise error

    monkeypatch.setitem(CHECKS, "plan", fail)
    assert outcome("plan") == cell
