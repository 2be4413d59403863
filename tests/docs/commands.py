"""Whether a command that a page shows would start: its targets, files, modules and flags exist."""

import re
import subprocess
import tomllib
from collections.abc import Sequence

from .pages import ROOT

#: Scripts that a page tells the reader to write.
OWN_SCRIPTS = ("train.py",)
#: Packages outside of the repository that `python -m` may start.
MODULES = ("pytest", "evenpack")


def check(words: Sequence[str]) -> None:
    """Raise `ValueError` where a command would not start."""
    CHECKS[words[0]](list(words[1:]))


def check_make(words: list[str]) -> None:
    """Targets are those of the Makefile; what a target hands on to a program is checked as that program's."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    for target in (word for word in words if "=" not in word):
        found = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode:
            raise ValueError(f"make {target}: {found.stderr.strip()}")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    unknown = [name for name in settings if f"$({name})" not in makefile]
    if unknown:
        raise ValueError(f"the Makefile does not use {unknown}")
    if "BENCH_ARGS" in settings:
        for target in words:
            if target.startswith("bench-"):
                check_module(f"benchmarks.{target.removeprefix('bench-').replace('-', '_')}", settings["BENCH_ARGS"].split())
    if "DEMO_ARGS" in settings:
        check_script("examples/demo/run.py", settings["DEMO_ARGS"].split())


def check_torchrun(words: list[str]) -> None:
    """Flags are those of torchrun; what it starts is checked as if python started it."""
    from torch.distributed.run import get_args_parser

    parsed = _parse(get_args_parser(), words)
    check_python([*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args])


def check_python(words: list[str]) -> None:
    """A script or module that exists, and flags that its source names; code compiles."""
    if words[0] == "-c":
        compile(words[1], "<command>", "exec")
    elif words[0] == "-m" and words[1] == "evenpack":
        check_evenpack(words[2:])
    elif words[0] == "-m":
        check_module(words[1], words[2:])
    else:
        check_script(words[0], words[1:])


def check_module(name: str, arguments: list[str]) -> None:
    """A module of the repository that names the flags which it is given, or one of a package that is known."""
    if name.split(".")[0] in MODULES:
        return
    path = ROOT / name.replace(".", "/")
    if not ((path / "__main__.py").is_file() or path.with_suffix(".py").is_file()):
        raise ValueError(f"no module {name}")
    # A package keeps the flags of its modules together.
    files = sorted((path if path.is_dir() else path.parent).glob("*.py"))
    _check_flags(name, "".join(file.read_text(encoding="utf-8") for file in files), arguments)


def check_script(name: str, arguments: list[str]) -> None:
    """A script of the repository that names the flags which it is given."""
    if name in OWN_SCRIPTS:
        return
    if not (ROOT / name).is_file():
        raise ValueError(f"no script {name}")
    _check_flags(name, (ROOT / name).read_text(encoding="utf-8"), arguments)


def _check_flags(name: str, source: str, arguments: list[str]) -> None:
    named = set(re.findall(r'"(--[\w-]+)"', source)) | {f"--{word}" for word in re.findall(r'\("(\w+)", "', source)}
    unknown = [word for word in arguments if word.startswith("--") and word.split("=")[0] not in named]
    if unknown:
        raise ValueError(f"{name} knows no {unknown}")


def check_evenpack(words: list[str]) -> None:
    """Arguments that the command accepts."""
    from evenpack.cli.main import build_parser

    if words not in (["--version"], ["--help"]):
        _parse(build_parser(), words)


def check_pip(words: list[str]) -> None:
    """Extras that exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        unknown = set(extras.split(",")) - set(project["optional-dependencies"])
        if unknown:
            raise ValueError(f"no extra {sorted(unknown)}")


def check_export(words: list[str]) -> None:
    """A name and a value."""
    if not all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in words):
        raise ValueError(f"not settings of the environment: {words}")


def _parse(parser, words: list[str]):
    try:
        return parser.parse_args(words)
    except SystemExit as error:
        raise ValueError(f"{parser.prog} does not accept {words}") from error


CHECKS = {
    "make": check_make,
    "torchrun": check_torchrun,
    "python": check_python,
    "evenpack": check_evenpack,
    "pip": check_pip,
    "export": check_export,
}
