"""Process groups of our own, made directly from their backend.

A group that torch registers is named after its ranks and the number of groups that a process knows, and its name is taken
again once it is destroyed: ranks with other numbers of groups would wait for each other, and a new group would find the
addresses of an old one. Ours have names that are given once, and only their members take part.
"""

import datetime
from typing import Any

import torch.distributed as dist


def open_gloo(store: Any, name: str, rank: int, num_ranks: int, timeout: float) -> Any:
    """Return a gloo group; collective over its members.

    Args:
        store: the job's key-value store.
        name: never used before, the same on every member.
        rank: this rank within the group.
        num_ranks: size of the group.
        timeout: seconds that an operation may take.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), rank, num_ranks, timeout=_span(timeout))


def open_nccl(store: Any, name: str, rank: int, num_ranks: int, timeout: float) -> Any:
    """Return an NCCL group with a communicator of its own; arguments as for `open_gloo`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _span(timeout)
    return dist.ProcessGroupNCCL(dist.PrefixStore(f"{name}/", store), rank, num_ranks, options)


def _span(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
