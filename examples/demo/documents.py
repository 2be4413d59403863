"""Text of long-tailed length that Python packages ship: docstrings, and descriptions of data sets."""

import importlib
import inspect
import textwrap
from typing import NamedTuple

from .pictures import package_file

#: Modules whose docstrings are read. All of them are imported by the training script anyway, or are quick to import.
MODULES = (
    "argparse", "collections", "csv", "datetime", "decimal", "functools", "io", "itertools", "json", "logging", "math", "os",
    "pathlib", "random", "re", "shutil", "statistics", "string", "subprocess", "textwrap", "threading", "zipfile",
    "numpy", "numpy.linalg", "numpy.fft", "torch", "torch.nn", "torch.nn.functional", "torch.optim",
)  # fmt: skip
#: Descriptions of data sets in scikit-learn, all longer than most docstrings.
DESCRIPTIONS = ("breast_cancer", "california_housing", "covtype", "diabetes", "digits", "iris", "kddcup99", "wine_data")
#: Shorter texts are signatures rather than documentation.
MIN_CHARACTERS = 60
#: A first sentence is cut here.
SUMMARY_CHARACTERS = 160


class Document(NamedTuple):
    """A text and the name of what it documents."""

    name: str
    text: str

    @property
    def summary(self) -> str:
        """Return the first sentence of prose, on one line."""
        signature = f"{self.name.rpartition('.')[2]}("
        paragraphs = [_on_one_line(paragraph) for paragraph in self.text.split("\n\n")]
        # A leading signature and reStructuredText's directives are not prose.
        prose = next((p for p in paragraphs if p and not p.startswith((signature, ".."))), paragraphs[0])
        sentence = prose.partition(". ")[0].rstrip(".") + "."
        return textwrap.shorten(sentence, SUMMARY_CHARACTERS, placeholder="...")


def load_documents(max_characters: int) -> list[Document]:
    """Return every document, in an order that depends on the installed packages only.

    Args:
        max_characters: longer texts are cut there, so that each fits into a pack.
    """
    found: dict[str, str] = {}
    for module in MODULES:
        for name, text in _docstrings(module):
            found.setdefault(text, name)
    for name in DESCRIPTIONS:
        text = package_file("sklearn", f"datasets/descr/{name}.rst").read_text(encoding="utf-8")
        found.setdefault(text, f"the data set {name}")
    return [Document(name, text[:max_characters]) for text, name in found.items()]


def _on_one_line(paragraph: str) -> str:
    """Join the lines of a paragraph, without those that underline a heading."""
    return " ".join(" ".join(line.split()) for line in paragraph.splitlines() if line.strip("-= "))


def _docstrings(module: str) -> list[tuple[str, str]]:
    """Return (qualified name, docstring) of a module's public callables, by name."""
    members = sorted(vars(importlib.import_module(module)).items())
    texts = [(f"{module}.{name}", inspect.getdoc(value)) for name, value in members if name[0] != "_" and callable(value)]
    return [(name, text) for name, text in texts if text is not None and len(text) >= MIN_CHARACTERS]
