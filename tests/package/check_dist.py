"""Build wheel and sdist into dist/, check them, and try each in an environment of its own: `make dist`.

The environments see the dependencies that are installed here, and nothing of the repository.
"""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST, WORK = ROOT / "dist", ROOT / "build" / "dist"


def run(*command: object, **settings: object) -> str:
    """Run a command; return what it prints, or end with what it complains about."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return wheel and sdist, with sound metadata."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def wheel_of(sdist: Path) -> Path:
    """Build a wheel from an sdist alone, as pip does for its users."""
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        WORK / "wheel",
        sdist,
    )
    (wheel,) = (WORK / "wheel").glob("*.whl")
    return wheel


def try_wheel(wheel: Path) -> str:
    """Install a wheel into a fresh environment and use it there; return what was found."""
    folder = WORK / "venv"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile", wheel)
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    # Dependencies come from this environment: a path in a .pth file is read, .pth files in there (evenpack's own) are not.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    _keep_compiled(packages / "evenpack")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1",
                   "NUMBA_CACHE_DIR": str(WORK / "numba"), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    version = run(folder / "bin" / "evenpack", "--version", cwd=WORK, env=environment).split()[1]
    assert f"-{version}-" in wheel.name, (version, wheel.name)
    script = Path(__file__).with_name("check_installed.py")
    return run(python, "-I", script, folder, cwd=WORK, env=environment).strip()


def _keep_compiled(package: Path) -> None:
    """Give every file a time that follows from its content: numba then compiles again only what changed."""
    for file in package.rglob("*.py"):
        moment = zlib.crc32(file.read_bytes())
        os.utime(file, (moment, moment))


def contents(archive: Path) -> set[str]:
    """Return the files of a wheel or an sdist."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def main() -> None:
    """Build, check, and say what was found."""
    WORK.mkdir(parents=True, exist_ok=True)
    wheel, sdist = build()
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "mkdocs.yml"} <= contents(sdist)
    print(f"{wheel.name}: {try_wheel(wheel)}", flush=True)
    again = wheel_of(sdist)
    assert contents(again) == contents(wheel), sorted(contents(again) ^ contents(wheel))
    print(f"{sdist.name}: {try_wheel(again)}", flush=True)


if __name__ == "__main__":
    main()
