"""An offline index of a dataset's lengths, and epochs that are planned from it."""

from .data import JsonLines, open_dataset
from .index import OfflineIndex
from .permutation import Permutation
from .plan import OfflineConfig
from .source import OfflineSource

__all__ = ["JsonLines", "OfflineConfig", "OfflineIndex", "OfflineSource", "Permutation", "open_dataset"]
