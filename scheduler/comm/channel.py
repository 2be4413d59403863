"""One scheduler's connection to its peers."""

import itertools
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ...core import PeerLostError
from ..config import SchedulerConfig
from .groups import ProcessGroups
from .liveness import Heartbeat, report_missing_ranks
from .transports import DeviceTransport, HostTransport, MemoryHub, MixedTransport, Transport, TransportError, fixed_peers
from .transports.backends import open_gloo, open_nccl
from .transports.threads import simulated_transport

#: Number of the next scheduler over each group.
_NUMBERS: dict[str, Iterator[int]] = {}
#: Ranks that one rank exchanges blocks with over the device transport, unless asked otherwise.
MAX_PEERS = 8
#: A collective may take this share of `timeout`; the rest is for finding out who is missing.
_PATIENCE = 0.6


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """Transports and sign of life of one scheduler.

    Attributes:
        steps: transport of the gather and the exchange of every step.
        control: transport for what the training thread asks between steps (`return_home`).
        heartbeat: sign of life.
        node_of_rank: `[R]`, number of each rank's node.
        peers: for every rank, the ranks it may send blocks to; None for any.
        gathers_on_device: the gather belongs on the training thread.
        exchanges_on_device: the exchange does.
    """

    steps: Transport
    control: Transport
    heartbeat: Heartbeat
    node_of_rank: tuple[int, ...]
    peers: list[list[int]] | None = None
    gathers_on_device: bool = False
    exchanges_on_device: bool = False

    @property
    def aside(self) -> Transport:
        """The transport on which the thread that prepares steps may gather at any time, whatever the training thread does."""
        return self.steps.blocks if isinstance(self.steps, MixedTransport) else self.steps

    def lost(self, error: TransportError, where: str) -> PeerLostError:
        """Return the error that names the ranks which a collective waited for in vain; the backend's own error is its cause.

        Args:
            error: what the transport raised.
            where: what the ranks were doing, for the message.
        """
        missing = self.heartbeat.missing()
        if missing:
            names = ", ".join(f"rank {rank} (last: {sign})" for rank, sign in missing)
            return PeerLostError(f"{names} stopped answering at {where}")
        stages = self.heartbeat.stages()
        if not stages:  # nothing else is known
            return PeerLostError(f"timed out waiting for a rank at {where}: {error}")
        # Ranks in another stage than this one are late; if there are none, any may be.
        late = [(rank, stage) for rank, stage in stages if stage != self.heartbeat.stage] or stages
        names = ", ".join(f"rank {rank} (last: {stage})" for rank, stage in late)
        return PeerLostError(f"timed out at {where} waiting for {names}; all processes are alive")

    def abort(self) -> None:
        """Wake every thread that waits for another rank with `Aborted`."""
        self.steps.abort()
        self.control.abort()

    def close(self) -> None:
        """Leave the group; nothing may be pending any more."""
        self.heartbeat.close()  # first, so that a peer that asks finds out that this rank left on purpose
        self.steps.close()
        self.control.close()


def open_channel(groups: ProcessGroups, config: SchedulerConfig, max_peers: int = MAX_PEERS) -> Channel:
    """Build what one scheduler needs to talk to its peers; collective over the data-parallel group.

    Every scheduler has groups of its own: two of them (training, evaluation), each with a worker thread, would otherwise mix
    up their collectives.

    Args:
        groups: process groups.
        config: settings; `transport` and `timeout` are applied here.
        max_peers: ranks that one rank exchanges blocks with over the device transport.

    Raises:
        PeerLostError: ranks that open none.
    """
    patience = config.timeout * _PATIENCE
    if groups.dp is None or groups.num_ranks == 1:
        return _started(MemoryHub(1).transport(0), MemoryHub(1).transport(0), config)
    members = tuple(dist.get_process_group_ranks(groups.dp))
    first, second = (simulated_transport(members, groups.rank, patience) for _ in range(2))
    if first is not None and second is not None:
        peers = fixed_peers(groups.num_ranks, max_peers) if config.transport == "device" else None
        return _started(first, second, config, peers=peers)
    return _open_groups(groups, config, patience, max_peers)


def _open_groups(groups: ProcessGroups, config: SchedulerConfig, patience: float, max_peers: int) -> Channel:
    # The store of the job has no public accessor; without it, no group of our own, and no lost rank could be named.
    store = dist.distributed_c10d._get_default_store()
    name = _new_name(groups.dp)
    with report_missing_ranks(store, name, rank=groups.rank, num_ranks=groups.num_ranks, patience=patience):
        return _open_named(groups, config, patience, max_peers, store, name)


def _open_named(
    groups: ProcessGroups, config: SchedulerConfig, patience: float, max_peers: int, store: Any, name: str
) -> Channel:
    pin, share = torch.cuda.is_available(), config.transport != "network"

    def gloo(what: str, *, share: bool = False) -> HostTransport:
        group = open_gloo(store, f"{name}/{what}", groups.rank, groups.num_ranks, patience)
        return HostTransport(group, timeout=patience, pin=pin, share=share)

    control = gloo("control")  # what it carries is small
    has_nccl = "nccl" in str(dist.get_backend_config(groups.dp))
    if config.transport == "host" or (config.transport in ("auto", "network") and not has_nccl):
        return _started(gloo("steps", share=share), control, config, store=store, name=name)
    device = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
    peers = fixed_peers(groups.num_ranks, max_peers)
    open_group = open_nccl if has_nccl else open_gloo
    group = open_group(store, f"{name}/device", groups.rank, groups.num_ranks, patience)
    on_device = DeviceTransport(group, device=device, peers=peers, timeout=patience)
    if config.transport == "device":
        return _started(
            on_device, control, config, store=store, name=name, peers=peers, gathers_on_device=True,
            exchanges_on_device=True,
        )  # fmt: skip
    mixed = MixedTransport(on_device, gloo("steps", share=share))
    return _started(mixed, control, config, store=store, name=name, gathers_on_device=True)


def _new_name(group: Any) -> str:
    """Return a name that no scheduler over this group had before; its members open their schedulers in one order."""
    base = str(group.group_name)
    return f"evenpack/{base}/{next(_NUMBERS.setdefault(base, itertools.count()))}"


def _started(
    steps: Transport, control: Transport, config: SchedulerConfig, *, store: Any = None, name: str = "", **more: Any
) -> Channel:
    """Find out which ranks share a node, and start the heartbeat."""
    host = np.array([zlib.crc32(socket.gethostname().encode())], np.int64)
    hosts = control.gather(host.view(np.uint8)).view(np.int64)[:, 0].tolist()
    order = list(dict.fromkeys(hosts))
    interval = min(1.0, config.timeout / 20)
    heartbeat = Heartbeat(
        store, name=name, rank=steps.rank, num_ranks=steps.num_ranks, interval=interval, patience=config.timeout / 2
    )
    nodes = tuple(order.index(value) for value in hosts)
    return Channel(steps=steps, control=control, heartbeat=heartbeat, node_of_rank=nodes, **more)
