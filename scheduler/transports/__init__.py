"""How integers and blocks travel between the ranks of a data-parallel group."""

from .base import Aborted, Transport, TransportError, gather_bytes
from .device import DeviceTransport, fixed_peers
from .host import HostTransport
from .memory import MemoryHub, MemoryTransport
from .mixed import MixedTransport

__all__ = [
    "Aborted",
    "DeviceTransport",
    "HostTransport",
    "MemoryHub",
    "MemoryTransport",
    "MixedTransport",
    "Transport",
    "TransportError",
    "fixed_peers",
    "gather_bytes",
]
