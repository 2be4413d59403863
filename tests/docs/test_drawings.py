"""The drawings of the pages on concepts show what they say, and are the same bytes every time."""

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

DRAWINGS = Path(__file__).parents[2] / "docs" / "drawings"
sys.path.insert(0, str(DRAWINGS))


@pytest.mark.parametrize("name", ["pack", "step", "sync_points", "movement", "flow"])
def test_same_bytes_on_a_white_page(name):
    module = importlib.import_module(name)
    drawn = module.draw().svg()
    assert drawn == module.draw().svg()
    assert b"<dc:date>" not in drawn
    page = ET.fromstring(drawn).find(".//{*}g[@id='patch_1']/{*}path")
    assert page is not None and "fill: #ffffff" in page.attrib["style"]
    assert (DRAWINGS.parent / "images" / f"{name}.svg").is_file()


def test_letters_are_legible_on_a_phone():
    from canvas import WIDTH

    for name in ("pack", "step", "sync_points", "movement", "flow"):
        sizes = [text.get_fontsize() for text in importlib.import_module(name).draw().axes.texts if text.get_text()]
        assert min(sizes) * 360 / WIDTH >= 7.5, name


def test_waiting_is_that_of_the_plans():
    from bars import finish_times, waiting
    from sync_points import plans

    _, for_step, for_microbatch = plans()
    assert int(finish_times(for_step, "step")[1][-1]) == for_step.value
    assert int(finish_times(for_microbatch, "microbatch")[1][-1]) == for_microbatch.value
    assert waiting(for_step, "step") < 0.02 < waiting(for_microbatch, "microbatch") < waiting(for_step, "microbatch")


def test_a_looser_tolerance_moves_less():
    from movement import TOLERANCES, frontier

    table, found, free = frontier()
    moved = [plan.moved_bytes for plan in found]
    assert moved[0] > moved[-1] and max(moved) < free.moved_bytes
    for tolerance, plan in zip(TOLERANCES, found, strict=True):
        assert plan.imbalance <= (1 + tolerance) * 1.001
        assert plan.moved_bytes == int(table.nbytes[np.flatnonzero(plan.rank != table.home)].sum())


def test_the_flow_is_that_of_the_imports(monkeypatch):
    import flow

    found = flow.imports()
    assert found["stages.collect"] == {"scheduler.sources"}
    assert found["stages.select"] == {"scheduler.plan"}
    assert {"collate", "models"} <= found["stages.describe"] & found["step"]
    monkeypatch.setattr(flow, "HELPERS", {})
    with pytest.raises(ValueError, match=r"scheduler/stages holds .*stages.blocks"):
        flow.imports()
