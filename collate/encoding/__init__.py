"""From an example of a dataset to tokens: conversations, media, the processor, settings that are recorded."""

from .conversation import Conversation, read_example
from .errors import ConversationError, UnreadableMediaError
from .processors import load_processor
from .settings import EncoderConfig
from .sizes import ImageRule, grid_of, image_rule

__all__ = [
    "Conversation",
    "ConversationError",
    "EncoderConfig",
    "ImageRule",
    "UnreadableMediaError",
    "grid_of",
    "image_rule",
    "load_processor",
    "read_example",
]
