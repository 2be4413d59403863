"""How integers and blocks travel between the ranks of a data-parallel group."""

from .base import Aborted, Transport, TransportError, gather_bytes
from .gloo import HostTransport, open_gloo
from .nccl import DeviceTransport, fixed_peers, open_nccl
from .threads import MemoryHub

__all__ = [
    "Aborted",
    "DeviceTransport",
    "HostTransport",
    "MemoryHub",
    "Transport",
    "TransportError",
    "fixed_peers",
    "gather_bytes",
    "open_gloo",
    "open_nccl",
]
