"""Hugging Face's `Trainer`, and TRL's `SFTTrainer`: one class in front of either packs its batches."""

from .mixin import PackedTrainerMixin

__all__ = ["PackedTrainerMixin"]
