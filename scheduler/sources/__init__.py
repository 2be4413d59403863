"""Where samples come from, and how a source says where it stands."""

from .base import Source, as_source
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
