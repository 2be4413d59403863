"""Where samples come from, and how a source says where it stands."""

from .adapt import as_source
from .base import Source
from .counting import CountingSource, IteratorSource
from .energon import EnergonSource
from .huggingface import HuggingFaceSource
from .loader import LoaderSource

__all__ = [
    "CountingSource",
    "EnergonSource",
    "HuggingFaceSource",
    "IteratorSource",
    "LoaderSource",
    "Source",
    "as_source",
]
