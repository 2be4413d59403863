"""Which ranks plan and exchange together."""

from typing import Any

import msgspec
import torch.distributed as dist


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
        is_writer: this process writes logs for the whole job; None: the first of `dp` that is the first of `cp`. With further
            dimensions of parallelism only one of those is; `from_mesh` finds out.
    """

    dp: Any = None
    cp: Any = None
    rank: int = 0
    num_ranks: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    is_writer: bool | None = None

    def __post_init__(self) -> None:
        if self.is_writer is None:
            msgspec.structs.force_setattr(self, "is_writer", self.rank == 0 and self.cp_rank == 0)

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
        groups = cls.of(data.get_group(), mesh[cp].get_group() if cp else None)
        return msgspec.structs.replace(groups, is_writer=not any(mesh.get_coordinate() or ()))

    @classmethod
    def from_megatron(cls, pg_collection: Any = None) -> "ProcessGroups":
        """Take Megatron-Core's data-parallel and context-parallel groups.

        Args:
            pg_collection: a `ProcessGroupCollection` with `dp` and `cp`; None for those of `parallel_state`.

        Raises:
            ValueError: Megatron-Core's parallel state is not initialised.
        """
        if pg_collection is not None:
            return cls.of(pg_collection.dp, getattr(pg_collection, "cp", None))
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise ValueError("initialise Megatron-Core's parallel_state first, or pass pg_collection")
        return cls.of(parallel_state.get_data_parallel_group(), parallel_state.get_context_parallel_group())

    @property
    def num_replicas(self) -> int:
        """Ranks over which a wrapper averages gradients: data-parallel times context-parallel."""
        return self.num_ranks * self.cp_size
