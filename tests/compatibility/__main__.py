"""Run the suite in this environment and bring the table up to date: `make compatibility`.

python -m tests.compatibility
"""

import importlib.metadata
import os
import platform
import re
import sys
import tomllib
import warnings
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from evenpack import __version__

from .checks import CHECKS, NotInstalled
from .table import LIBRARIES, PAGE, RECORD, read, render, updated

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def versions() -> dict[str, str | None]:
    """Return the versions of this environment; None where a library is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def lowest() -> dict[str, str]:
    """Return the lowest version of each library that the project declares."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    found = {"python": project["requires-python"].removeprefix(">=")}
    for requirement in named:
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", requirement)
        if match and match[1] in LIBRARIES:
            found[match[1]] = match[2]
    return found


def outcome(name: str) -> str:
    """Run one check; return what stands in its cell."""
    try:
        CHECKS[name]()
    except NotInstalled:
        return "-"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
    return "ok"


def main() -> int:
    """Run, record, render; return 1 where a check failed."""
    import json

    warnings.simplefilter("ignore")
    checks = {}
    for name in CHECKS:
        checks[name] = outcome(name)
        print(f"{name}: {checks[name]}", flush=True)
    rows = updated(read(), {"versions": versions(), "evenpack": __version__, "checks": checks})
    RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(rows, lowest()), encoding="utf-8")
    return int(any(value not in ("ok", "-") for value in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
