"""Model families: fields, rope rule, media tokens, cost coefficients, runners."""

if __name__ != "evenpack.models":
    raise ImportError("import this folder as evenpack.models: under its bare name a second copy of every class would appear")

from .adapter import ModelAdapter
from .dummy import dummy_sample, dummy_text
from .layout import sample_layout
from .registry import adapter_for, check_config
from .rope import mrope_positions, pack_positions

__all__ = [
    "ModelAdapter",
    "adapter_for",
    "check_config",
    "dummy_sample",
    "dummy_text",
    "mrope_positions",
    "pack_positions",
    "sample_layout",
]
