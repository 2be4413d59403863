"""evenpack: online sequence packing for data-parallel training of vision-language models."""

__version__ = "0.1.0"
