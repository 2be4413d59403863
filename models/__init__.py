"""Model families: fields, rope rule, media tokens, cost coefficients, runners."""

if __name__ != "evenpack.models":
    raise ImportError("import this folder as evenpack.models: under its bare name a second copy of every class would appear")

from .adapter import ModelAdapter
from .family import Family
from .layout.positions import mrope_positions, pack_positions
from .layout.sample_layout import sample_layout
from .registry import adapter_for, check_config, register_family
from .setup.dummy import dummy_sample, dummy_text
from .setup.forward import forward_arguments
from .setup.prepare import check_model, prepare_model
from .setup.probe import verify_isolation
from .setup.unwrap import unwrap_model

__all__ = [
    "Family",
    "ModelAdapter",
    "adapter_for",
    "check_config",
    "check_model",
    "dummy_sample",
    "dummy_text",
    "forward_arguments",
    "mrope_positions",
    "pack_positions",
    "prepare_model",
    "register_family",
    "sample_layout",
    "unwrap_model",
    "verify_isolation",
]
