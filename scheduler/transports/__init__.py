"""How integers and blocks travel between the ranks of a data-parallel group."""

from .base import Aborted, Transport, TransportError
from .host import HostTransport
from .memory import MemoryHub, MemoryTransport

__all__ = ["Aborted", "HostTransport", "MemoryHub", "MemoryTransport", "Transport", "TransportError"]
