"""Where this rank stands in its model replica, and a name that the replica's ranks share."""

from typing import Any

import msgspec
import torch.distributed as dist

_NOTES = "evenpack/megatron"


class Ranks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The groups of one rank of a model replica: tensor, context and pipeline parallel, and its data-parallel peers.

    The reader of a replica is the rank that comes first in all three. Ranks are found by membership, so any order of
    Megatron-Core's dimensions will do.

    Attributes:
        dp: data-parallel group, context parallelism excluded.
        tp: tensor-parallel group.
        cp: context-parallel group, None where there is none.
        pp: pipeline-parallel group.
    """

    dp: Any
    tp: Any
    cp: Any
    pp: Any

    @classmethod
    def of(cls, pg_collection: Any = None) -> "Ranks":
        """Take the groups of a `ProcessGroupCollection`; None for those of `parallel_state`.

        Raises:
            ValueError: parallel state that is not initialised, or a collection without a group that is needed.
        """
        if pg_collection is None:
            from megatron.core import parallel_state

            if not parallel_state.model_parallel_is_initialized():
                raise ValueError("initialise Megatron-Core's parallel_state first, or pass pg_collection")
            return cls(
                dp=parallel_state.get_data_parallel_group(),
                tp=parallel_state.get_tensor_model_parallel_group(),
                cp=parallel_state.get_context_parallel_group(),
                pp=parallel_state.get_pipeline_model_parallel_group(),
            )
        found: dict[str, Any] = {name: getattr(pg_collection, name, None) for name in ("dp", "dp_cp", "tp", "cp", "pp")}
        missing = [name for name in ("dp", "tp", "pp") if found[name] is None]
        if found["cp"] is None and found["dp_cp"] is not None and found["dp_cp"].size() != found["dp"].size():
            missing.append("cp")
        if missing:
            raise ValueError(f"pg_collection lacks the groups {missing}")
        return cls(dp=found["dp"], tp=found["tp"], cp=found["cp"], pp=found["pp"])

    @property
    def cp_rank(self) -> int:
        """This rank within its context-parallel group."""
        return self.cp.rank() if self.cp is not None else 0

    @property
    def cp_size(self) -> int:
        """Size of the context-parallel group."""
        return self.cp.size() if self.cp is not None else 1

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return int(self.pp.size() * self.cp_size * self.tp.size())

    @property
    def rank(self) -> int:
        """This rank within its replica; 0 is the reader."""
        return int((self.pp.rank() * self.cp_size + self.cp_rank) * self.tp.size() + self.tp.rank())

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads for its replica."""
        return self.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first pipeline stage."""
        return bool(self.pp.rank() == 0)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return bool(self.pp.rank() == self.pp.size() - 1)

    @property
    def key(self) -> tuple[str, ...]:
        """The names of the groups, which no other set of groups of this job has."""
        return tuple("" if group is None else str(group.group_name) for group in (self.dp, self.tp, self.cp, self.pp))

    def where(self) -> str:
        """Name this rank for an error message."""
        return f"rank {dist.get_rank()} (dp {self.dp.rank()}, pp {self.pp.rank()}, cp {self.cp_rank}, tp {self.tp.rank()})"

    def replica_name(self, store: Any) -> str:
        """Return a name that exactly the ranks of this replica find; needs them all to ask.

        Every rank follows its tensor-parallel group to that group's first rank, and that one's context-parallel group to
        its first rank: both left a note in the job's store. The pipeline-parallel group of the rank where that ends is one
        name for the whole replica, after two look-ups a rank, however many ranks there are.
        """
        tp, pp = str(self.tp.group_name), str(self.pp.group_name)
        cp = f"none/{dist.get_rank()}" if self.cp is None else str(self.cp.group_name)
        if self.tp.rank() == 0:
            store.set(f"{_NOTES}/tp/{tp}", cp)
            if self.cp_rank == 0:
                store.set(f"{_NOTES}/cp/{cp}", pp)
        cp_of_first = store.get(f"{_NOTES}/tp/{tp}").decode()
        return str(store.get(f"{_NOTES}/cp/{cp_of_first}").decode())
