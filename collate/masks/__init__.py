"""Assistant masks: which tokens of a conversation train, decided by a chain that fails closed."""

from .chain import STRATEGIES, AssistantMaskError, TrainedTurns, assistant_turns, turn_weights
from .job import MaskJob, NotApplicable, Renderer, Turn
from .presets import PRESETS, MaskPreset, detect_preset, preset_named

__all__ = [
    "PRESETS",
    "STRATEGIES",
    "AssistantMaskError",
    "MaskJob",
    "MaskPreset",
    "NotApplicable",
    "Renderer",
    "TrainedTurns",
    "Turn",
    "assistant_turns",
    "detect_preset",
    "preset_named",
    "turn_weights",
]
