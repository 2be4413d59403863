"""What the site's pages are made of besides the text in docs/: pages from the root, help texts, signatures of settings."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
#: Page of the site: file at the root.
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
HELP = re.compile(r"^<!-- help: (?P<command>[a-z ]*) -->$", re.MULTILINE)
HELP_WIDTH = 100
#: What a browser fetches without being asked.
FETCHED = re.compile(r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|icon)")[^>]*(?:src|href)="(https?://[^"]+)"')


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose text lies at the root of the repository."""
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of a command in the place of `<!-- help: COMMAND -->`."""
    return HELP.sub(lambda found: f"```text\n{help_of(found['command'].split())}\n```", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Refuse a page that would fetch something from elsewhere when it is read."""
    found = FETCHED.findall(output)
    if found:
        raise PluginError(f"{page.file.src_uri} would fetch {found} when it is read")


def help_of(command: list[str]) -> str:
    """Return what `evenpack COMMAND --help` prints.

    Raises:
        KeyError: a command that does not exist.
    """
    parser = dict(parsers())[" ".join(command)]
    parser.formatter_class = type("Wide", (parser.formatter_class,), {"__init__": _wide(parser.formatter_class)})
    return parser.format_help().strip()


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command, as one writes it behind `evenpack`, and its parser."""
    from evenpack.cli.main import build_parser

    def below(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for key, inner in action.choices.items():
                    yield from below(f"{name} {key}".strip(), inner)

    return below("", build_parser())


def _wide(base: type[argparse.HelpFormatter]) -> Any:
    return lambda self, prog, **settings: base.__init__(self, prog, **{**settings, "width": HELP_WIDTH})


class StructSignatures(griffe.Extension):
    """Gives `msgspec.Struct` classes, which have no `__init__` in their source, the signature that they have when called.

    It also says `Examples:` to the reader of docstrings, which does not know the singular.
    """

    def on_instance(self, *, node: Any, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called with the whole package read, so that base classes are known."""
        for cls in list(_classes(pkg)):
            family = [cls, *(base for base in cls.mro() if isinstance(base, griffe.Class))]
            if "__init__" in cls.members or not any(str(base).endswith("Struct") for one in family for base in one.bases):
                continue
            fields = {field.name: field for one in reversed(family) for field in one.members.values() if _is_field(field)}
            parameters = [_parameter(field) for field in fields.values()]
            cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls))


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member


def _is_field(member: Any) -> bool:
    if not isinstance(member, griffe.Attribute) or member.annotation is None or "property" in member.labels:
        return False
    return not member.name.startswith("_") and not str(member.annotation).startswith("ClassVar")


def _parameter(field: griffe.Attribute) -> griffe.Parameter:
    kind = griffe.ParameterKind.keyword_only
    return griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
