"""How integers and blocks travel between the ranks of a data-parallel group."""

from .base import Aborted, Transport, TransportError, gather_bytes
from .gloo import HostTransport
from .nccl import DeviceTransport, fixed_peers
from .split import MixedTransport
from .threads import MemoryHub, MemoryTransport

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
