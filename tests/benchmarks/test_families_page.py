"""The page on families lists what the adapters' tables hold."""

from benchmarks.families import page
from benchmarks.families.tiny import FAMILIES
from evenpack.models.families.generic import GENERIC
from evenpack.models.families.refused import REFUSED


def test_the_page_lists_every_family():
    exact, refused = page.families_on_page()
    assert exact == set(FAMILIES) and refused == set(REFUSED)
    assert {name.partition(" ")[0] for name in FAMILIES} <= set(GENERIC)


def test_a_page_is_written_again(tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text(page.PAGE.read_text())
    page.write_page({"llava": {"logits": "7e-07"}}, copy)
    assert page.families_on_page(copy) == page.families_on_page() and copy.read_text().count(page.TITLE) == 1
    assert "| 7e-07 | - (-) | - | - |" in copy.read_text() and "## Media tokens" in copy.read_text()
