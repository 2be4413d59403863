"""One scheduler's connection to its peers."""

import itertools
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ...core import FieldMismatchError
from ..config import SchedulerConfig
from .groups import ProcessGroups
from .liveness import CLOSED, Heartbeat
from .transports import (
    DeviceTransport,
    HostTransport,
    MemoryHub,
    Transport,
    TransportError,
    fixed_peers,
    gather_bytes,
    open_gloo,
    open_nccl,
)
from .transports.threads import Simulation

#: Opens a transport over the data-parallel group, whose collectives give up after so many seconds; every rank calls it.
OpenTransport = Callable[[ProcessGroups, float], Transport]

#: Number of the next scheduler over each group.
_NUMBERS: dict[str, Iterator[int]] = {}
#: Ranks that one rank exchanges blocks with over the device transport, unless asked otherwise.
MAX_PEERS = 8
#: What a transport must have.
_METHODS = ("rank", "num_ranks", "gather", "alloc_send_buffers", "exchange", "buffer_bytes", "abort", "close")
#: A collective may take this share of `timeout`; the rest is for finding out who is missing.
_PATIENCE = 0.6


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """Transports and sign of life of one scheduler.

    Attributes:
        steps: transport of every step's gather.
        blocks: transport of every step's exchange. On it, the thread that prepares steps may also gather while the training
            thread does something else.
        control: transport for what the training thread asks between steps (`return_home`).
        heartbeat: sign of life.
        node_of_rank: `[R]`, number of each rank's node.
        peers: for every rank, the ranks it may send blocks to; None for any.
    """

    steps: Transport
    blocks: Transport
    control: Transport
    heartbeat: Heartbeat
    node_of_rank: tuple[int, ...]
    peers: list[list[int]] | None = None

    @property
    def gathers_on_device(self) -> bool:
        """Whether the gather belongs on the training thread."""
        return isinstance(self.steps, DeviceTransport)

    @property
    def exchanges_on_device(self) -> bool:
        """Whether the exchange belongs on the training thread."""
        return isinstance(self.blocks, DeviceTransport)

    def abort(self) -> None:
        """Wake every thread that waits for another rank with `Aborted`."""
        for transport in (self.steps, self.blocks, self.control):
            transport.abort()

    def close(self) -> None:
        """Leave the group; nothing may be pending any more."""
        self.heartbeat.close()  # first, so that a peer that asks finds out that this rank left on purpose
        for transport in (self.steps, self.blocks, self.control):
            transport.close()


def open_channel(
    groups: ProcessGroups, config: SchedulerConfig, max_peers: int = MAX_PEERS, open_transport: OpenTransport | None = None
) -> Channel:
    """Build what one scheduler needs to talk to its peers; collective over the data-parallel group.

    Every scheduler has groups of its own: two of them (training, evaluation), each with a worker thread, would otherwise mix
    up their collectives.

    Args:
        groups: process groups.
        config: settings; `transport` and `timeout` are applied here.
        max_peers: ranks that one rank exchanges blocks with over the device transport.
        open_transport: opens the transport of gather and exchange, in place of those that `config.transport` chooses from;
            a single rank needs none.

    Raises:
        PeerLostError: ranks that open none.
        FieldMismatchError: ranks that open different transports.
        TypeError: what was opened lacks a method.
    """
    patience, rank, num_ranks = config.timeout * _PATIENCE, groups.rank, groups.num_ranks
    if groups.dp is None or num_ranks == 1:
        alone = MemoryHub(1).transport(0)
        return _channel(alone, alone, MemoryHub(1).transport(0), _heartbeat(groups, config))
    members = tuple(dist.get_process_group_ranks(groups.dp))
    first, second = (Simulation.transport(members, rank, patience) for _ in range(2))
    peers = fixed_peers(num_ranks, max_peers)
    only = peers if config.transport == "device" else None
    if first is not None and second is not None:
        return _channel(first, first, second, _heartbeat(groups, config), peers=only)
    # The store of the job has no public accessor; without it, no group of our own, and no lost rank could be named.
    store = dist.distributed_c10d._get_default_store()
    # Names are new: the members of a group open their schedulers in one order.
    base = str(groups.dp.group_name)
    name = f"evenpack/{base}/{next(_NUMBERS.setdefault(base, itertools.count()))}"
    has_nccl = "nccl" in str(dist.get_backend_config(groups.dp))
    on_device = config.transport == "device" or (config.transport in ("auto", "network") and has_nccl)

    def host(use: str, *, share: bool = False) -> HostTransport:
        group = open_gloo(store, f"{name}/{use}", rank, num_ranks, patience)
        return HostTransport(group, timeout=patience, pin=torch.cuda.is_available(), share=share)

    def device() -> DeviceTransport:
        group = (open_nccl if has_nccl else open_gloo)(store, f"{name}/device", rank, num_ranks, patience)
        where = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
        return DeviceTransport(group, device=where, peers=peers, timeout=patience)

    heartbeat, started = _heartbeat(groups, config, store, name), time.monotonic()
    try:
        control = host("control")  # what it carries is small
        _check_same(control, open_transport)
        if open_transport is not None:
            own = _checked(open_transport(groups, patience), groups)
            return _channel(own, own, control, heartbeat)
        gathers: Transport | None = device() if on_device else None
        blocks = gathers if config.transport == "device" else None
        blocks = blocks or host("steps", share=config.transport != "network")
        return _channel(gathers or blocks, blocks, control, heartbeat, peers=only)
    except BaseException as error:
        # What fails at once is this rank's own trouble, a network interface say, unless another rank gave up before.
        is_late = isinstance(error, TransportError) or time.monotonic() - started > 0.9 * patience
        has_waited = is_late or any(stage == CLOSED for _, stage in heartbeat.stages())
        of_group = has_waited and isinstance(error, RuntimeError | TransportError)
        lost = heartbeat.lost(error, "the start of the scheduler") if of_group else None
        heartbeat.close()
        if lost is not None:
            raise lost from error
        raise


def _check_same(control: Transport, open_transport: OpenTransport | None) -> None:
    """Raise `FieldMismatchError` unless all ranks open transports of one name: others would wait for each other."""
    name = "" if open_transport is None else getattr(open_transport, "__qualname__", type(open_transport).__qualname__)
    names = [data.decode() for data in gather_bytes(control, name.encode())]
    for rank, other in enumerate(names):
        if other != names[0]:
            own = "('': what the settings say)"
            raise FieldMismatchError(f"transport is {names[0]!r} on rank 0 and {other!r} on rank {rank} {own}")


def _checked(transport: Any, groups: ProcessGroups) -> Transport:
    """Return a transport from outside, or raise `TypeError` where it is none."""
    lacking = [name for name in _METHODS if not hasattr(transport, name)]
    if lacking:
        raise TypeError(f"a transport needs {', '.join(lacking)}: see evenpack.scheduler.Transport; got {transport!r}")
    if (transport.rank, transport.num_ranks) != (groups.rank, groups.num_ranks):
        where, here = f"rank {transport.rank} of {transport.num_ranks}", f"rank {groups.rank} of {groups.num_ranks}"
        raise TypeError(f"the transport says {where}, the data-parallel group {here}")
    return transport  # type: ignore[no-any-return]


def _heartbeat(groups: ProcessGroups, config: SchedulerConfig, store: Any = None, name: str = "") -> Heartbeat:
    interval, patience = min(1.0, config.timeout / 20), config.timeout / 2
    return Heartbeat(store, name=name, rank=groups.rank, num_ranks=groups.num_ranks, interval=interval, patience=patience)


def _channel(steps: Transport, blocks: Transport, control: Transport, heartbeat: Heartbeat, **more: Any) -> Channel:
    """Find out which ranks share a node."""
    host = np.array([zlib.crc32(socket.gethostname().encode())], np.int64)
    hosts = control.gather(host.view(np.uint8)).view(np.int64)[:, 0].tolist()
    order = list(dict.fromkeys(hosts))
    nodes = tuple(order.index(value) for value in hosts)
    return Channel(steps=steps, blocks=blocks, control=control, heartbeat=heartbeat, node_of_rank=nodes, **more)
