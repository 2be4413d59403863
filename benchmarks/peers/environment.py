"""An environment of its own for released packages: nothing of them is installed into ours, nothing of them is kept here."""

import subprocess
import sys
import sysconfig
from pathlib import Path

#: Package and the version that the comparison was written for. Only single files of them run, so no dependencies come along.
PACKAGES = {
    "verl": "0.9.1",
    "trl": "1.16.0",
    "axolotl": "0.19.0",
    "binpacking": "2.0.1",
    "ms-swift": "4.6.0",
    "llamafactory": "0.9.5",
    "nemo-automodel": "0.7.0",
    "veomni": "0.1.12",
    "megatron-bridge": "0.3.1",
    "megatron-core": "0.19.2",
}
#: Packages whose wheels of a newer Python are taken: their files are read, not run.
READ_ONLY = {"megatron-core": "3.12"}


def build(folder: Path) -> tuple[Path, dict[str, str]]:
    """Make the environment where it is missing, and install what can be had.

    The large libraries that the files import (torch, numpy, numba, pyarrow) are those of the environment that runs this.

    Args:
        folder: where it lies.

    Returns:
        Its interpreter, and why a package could not be had, by package.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        paths = [*(str(_home(folder, name).resolve()) for name in PACKAGES), sysconfig.get_path("purelib")]
        (site_packages / "packages.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    missing = {name: _install(folder, name, version) for name, version in PACKAGES.items()}
    return python, {name: reason for name, reason in missing.items() if reason}


def _home(folder: Path, name: str) -> Path:
    """Return a package's own folder: two of them share the namespace `megatron`."""
    return folder / "packages" / name


def _install(folder: Path, name: str, version: str) -> str:
    """Install one package; return why not, or nothing."""
    home = _home(folder, name)
    if (home / f"{name.replace('-', '_')}-{version}.dist-info").is_dir():
        return ""
    print(f"installing {name} {version} into {folder}", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary", ":all:", "--no-compile", "--quiet", "--disable-pip-version-check"]
    options += ["--upgrade", "--target", str(home)]
    if name in READ_ONLY:
        options += ["--python-version", READ_ONLY[name]]
    command = [sys.executable, "-m", "pip", "install", *options]
    try:
        done = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return f"{name}=={version}: no answer within 300 s"
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return f"{name}=={version}: {(errors or ['pip failed'])[-1]}"
