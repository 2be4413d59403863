"""What a build contains and what importing it does."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "models", "collate", "scheduler", "integrations", "cli")


def python(code, **environment):
    """Run code in a fresh interpreter at the project's root."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_names_are_refused(folder):
    result = python(f"import {folder}")
    assert result.returncode != 0
    assert f"ImportError: import this folder as evenpack.{folder}" in result.stderr


def test_optional_frameworks_are_imported_lazily():
    code = f"""
import importlib, sys
for folder in {FOLDERS}:
    importlib.import_module("evenpack." + folder)
print([name for name in ("megatron", "transformer_engine", "transformers") if name in sys.modules])
"""
    result = python(code)
    assert result.stdout.strip() == "[]", result.stderr


def test_each_class_exists_once():
    code = """
from evenpack.scheduler import PlanConfig, SampleTable
import evenpack.scheduler.plan as plan
assert plan.PlanConfig is PlanConfig and plan.SampleTable is SampleTable
assert PlanConfig.__module__ == "evenpack.scheduler.plan.settings", PlanConfig.__module__
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_wheel_holds_the_package_alone(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"evenpack"}
    assert {name.split("/")[1] for name in names if name.startswith("evenpack/")} >= {*FOLDERS, "__init__.py", "py.typed"}
    for folder in FOLDERS:
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        sources = {path.relative_to(ROOT).as_posix() for path in files}
        assert sources == {name.removeprefix("evenpack/") for name in names if name.startswith(f"evenpack/{folder}/")}


def test_the_changelog_knows_the_version():
    from evenpack import __version__

    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dynamic"]


def test_the_names_of_a_loop_are_at_the_top_and_load_when_they_are_asked_for():
    code = """
import sys, evenpack
heavy = {"torch", "numba", "numpy", "evenpack.scheduler"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
names = {"PackingScheduler", "SchedulerConfig", "ProcessGroups", "CostModel", "adapter_for", "prepare_model"}
assert names == {*evenpack.__all__} and names <= {*dir(evenpack)}
assert not heavy & set(sys.modules)
from evenpack import *
import evenpack.models, evenpack.scheduler
for name in evenpack.__all__:
    home = evenpack.models if name in ("adapter_for", "prepare_model") else evenpack.scheduler
    assert globals()[name] is getattr(evenpack, name) is getattr(home, name), name
try:
    evenpack.PackedSchedular
except AttributeError as error:
    assert str(error) == "module 'evenpack' has no attribute 'PackedSchedular'", error
else:
    raise SystemExit("no error")
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
