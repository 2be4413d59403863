"""Examples that cannot be encoded, each error naming the example."""

from ...core import SampleError


class ConversationError(SampleError):
    """A conversation of the wrong form, or one that the chat template refuses."""


class UnreadableMediaError(SampleError):
    """A media item that is missing, cannot be read, or cannot be processed with what is installed."""
