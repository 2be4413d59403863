"""Which ranks plan and exchange together."""

import socket
import zlib
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist

from .config import SchedulerConfig
from .heartbeat import Heartbeat
from .transports import HostTransport, MemoryHub, Transport
from .transports.memory import simulated_transport


class ProcessGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The process groups of one model replica.

    Ranks are found by membership in a group, never by arithmetic on rank numbers.

    Attributes:
        dp: data-parallel group: the ranks that bring samples and plan together; None for a single rank.
        cp: context-parallel group, None where a sequence lies on one rank.
        rank: this rank within `dp`.
        num_ranks: size of `dp`.
        cp_rank: this rank within `cp`.
        cp_size: size of `cp`.
    """

    dp: Any = None
    cp: Any = None
    rank: int = 0
    num_ranks: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    @classmethod
    def from_world(cls) -> "ProcessGroups":
        """Take every rank of the job as one data-parallel group, without model parallelism.

        Without an initialised process group, this process is a group of one.
        """
        return cls.of(dist.group.WORLD) if dist.is_initialized() else cls()

    @classmethod
    def of(cls, dp: Any, cp: Any = None) -> "ProcessGroups":
        """Take process groups that exist.

        Args:
            dp: data-parallel group that this rank belongs to.
            cp: context-parallel group that this rank belongs to, None without context parallelism.

        Raises:
            ValueError: this rank is not a member of a group.
        """
        for name, group in (("dp", dp), ("cp", cp)):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(f"rank {dist.get_rank()} is not a member of the {name} group")
        return cls(
            dp=dp,
            cp=cp,
            rank=dist.get_rank(dp),
            num_ranks=dist.get_world_size(dp),
            cp_rank=dist.get_rank(cp) if cp is not None else 0,
            cp_size=dist.get_world_size(cp) if cp is not None else 1,
        )

    @classmethod
    def from_mesh(cls, mesh: Any, *, dp: str | tuple[str, ...] = "dp", cp: str | None = None) -> "ProcessGroups":
        """Take the groups of a `torch.distributed.device_mesh.DeviceMesh`.

        Args:
            mesh: mesh with named dimensions.
            dp: data-parallel dimension, or the dimensions that together are (replicate and shard, for HSDP).
            cp: context-parallel dimension, if any.

        Raises:
            ValueError: a dimension that the mesh does not have.
        """
        names = mesh.mesh_dim_names or ()
        dims = (dp,) if isinstance(dp, str) else tuple(dp)
        for name in (*dims, *([cp] if cp else [])):
            if name not in names:
                raise ValueError(f"the mesh has no dimension {name!r}, its dimensions are {names}")
        data = mesh[dims[0]] if len(dims) == 1 else mesh[dims]._flatten("_".join(dims))
        return cls.of(data.get_group(), mesh[cp].get_group() if cp else None)

    @property
    def num_replicas(self) -> int:
        """Ranks over which a wrapper averages gradients: data-parallel times context-parallel."""
        return self.num_ranks * self.cp_size

    def open_channel(self, config: SchedulerConfig) -> "Channel":
        """Build what one scheduler needs to talk to its peers; collective over `dp`.

        Every scheduler has groups of its own: two of them (training, evaluation), each with a worker thread, would
        otherwise mix up their collectives.
        """
        if self.dp is None or self.num_ranks == 1:
            return Channel.over(MemoryHub(1).transport(0), MemoryHub(1).transport(0), store=None, timeout=config.timeout)
        members = tuple(dist.get_process_group_ranks(self.dp))
        simulated = [simulated_transport(members, self.rank, config.timeout) for _ in range(2)]
        if simulated[0] is not None and simulated[1] is not None:
            return Channel.over(simulated[0], simulated[1], store=None, timeout=config.timeout)
        return self._open_gloo(config, members)

    def _open_gloo(self, config: SchedulerConfig, members: tuple[int, ...]) -> "Channel":
        import datetime

        import torch

        wait = datetime.timedelta(seconds=config.timeout)
        pin = torch.cuda.is_available()
        steps, control = (
            HostTransport(
                dist.new_group(list(members), backend="gloo", timeout=wait, use_local_synchronization=True),
                timeout=config.timeout,
                pin=pin,
            )
            for _ in range(2)
        )
        # The name of the group is unique and equal on its members: it keeps the keys of several schedulers apart.
        store = dist.distributed_c10d._get_default_store()
        return Channel.over(steps, control, store=store, timeout=config.timeout, name=steps.name)


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler's connection to its peers.

    Attributes:
        steps: transport of the gather and the exchange of every step; the worker thread's.
        control: transport for what the training thread asks between steps (`return_home`).
        heartbeat: sign of life.
        node_of_rank: `[R]`, number of each rank's node.
    """

    steps: Transport
    control: Transport
    heartbeat: Heartbeat
    node_of_rank: tuple[int, ...]

    @classmethod
    def over(cls, steps: Transport, control: Transport, *, store: Any, timeout: float, name: str = "") -> "Channel":
        """Start the heartbeat and find out which ranks share a node."""
        host = np.array([zlib.crc32(socket.gethostname().encode())], np.int64)
        hosts = control.gather(host.view(np.uint8)).view(np.int64)[:, 0].tolist()
        order = list(dict.fromkeys(hosts))
        interval = min(1.0, timeout / 20)
        heartbeat = Heartbeat(store, name=name, rank=steps.rank, num_ranks=steps.num_ranks, interval=interval)
        return cls(steps=steps, control=control, heartbeat=heartbeat, node_of_rank=tuple(order.index(value) for value in hosts))

    def close(self) -> None:
        """Abort what is pending and stop the heartbeat."""
        self.steps.abort()
        self.control.abort()
        self.heartbeat.close()
