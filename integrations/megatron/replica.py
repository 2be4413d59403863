"""What the ranks of one replica tell each other inside a call, over groups of our own."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ...core import FieldMismatchError
from ...core.errors import from_wire, to_wire
from ...scheduler.comm.transports import HostTransport, Transport, open_gloo
from .ranks import Ranks

#: Bytes of a `CallInfo` on the wire: a fixed size, so that one collective is enough.
_INFO_BYTES = 2048
_LINKS: dict[tuple[str, ...], "ReplicaLink"] = {}


class CallInfo(msgspec.Struct, frozen=True, array_like=True):
    """What every rank says at the beginning of a call.

    Attributes:
        place: how messages name the rank.
        dp_rank: number of its replica.
        count: `num_microbatches` as it was called with.
        fields: the groups of fields that its pipeline stage needs.
        error: class and message of what it found wrong, None where it can go on.
    """

    place: str
    dp_rank: int
    count: int
    fields: tuple[str, ...]
    error: tuple[str, str] | None = None


_INFO = msgspec.msgpack.Decoder(CallInfo)


class ReplicaLink:
    """Collectives within a replica, and between the readers of all replicas; every rank makes the same calls.

    Args:
        ranks: this rank's groups.
        timeout: seconds that a collective may take.
    """

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        # The store of the job has no public accessor; without it, no group of our own.
        store = dist.distributed_c10d._get_default_store()
        self._ranks = ranks
        name = ranks.replica_name(store)
        self._replica = _open(store, f"evenpack/megatron/replica/{name}", ranks.rank, ranks.size, timeout, share=True)
        readers = f"evenpack/megatron/readers/{ranks.dp.group_name}"
        self._readers = _open(store, readers, ranks.dp.rank(), ranks.dp.size(), timeout) if ranks.is_reader else None

    def gather(self, info: CallInfo) -> list[CallInfo]:
        """Bring what every rank says to the readers; the other ranks get those of their replica.

        Returns:
            Notes, replica by replica, each in the replica's own order.
        """
        calls = _row(info) if self._replica is None else self._replica.gather(_row(info))
        if self._readers is not None:
            calls = self._readers.gather(calls.reshape(-1))
        return [_read(row) for row in calls.reshape(-1, _INFO_BYTES)]

    def deliver(self, payloads: Sequence[torch.Tensor | None] | None) -> torch.Tensor | None:
        """Hand every rank of the replica what the reader has for it.

        Args:
            payloads: on the reader, uint8 `[n]` for each rank in the replica's order; elsewhere None.

        Returns:
            The payload of this rank; None if that is nothing.
        """
        if self._replica is None:
            return None
        parts = payloads or [None] * self._ranks.size
        mine = np.array([0 if part is None else part.numel() for part in parts], np.int64)
        of_all = self._replica.gather(mine.view(np.uint8))[0].view(np.int64).tolist()
        if not sum(of_all):
            return None
        sources = [of_all[self._ranks.rank], *[0] * (self._ranks.size - 1)]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        received = self._replica.exchange([nothing if part is None else part for part in parts], sources)[0]
        return received if len(received) else None


def link_of(ranks: Ranks, timeout: float) -> ReplicaLink:
    """Return the link over a rank's groups, opened at the first call; collective then."""
    if ranks.key not in _LINKS:
        _LINKS[ranks.key] = ReplicaLink(ranks, timeout)
    return _LINKS[ranks.key]


def check_calls(calls: Sequence[CallInfo]) -> None:
    """Raise what a rank found wrong, or that ranks disagree; the same on every reader, as all see the same calls.

    Raises:
        EvenpackError: the first rank's error, or
        ValueError: where that was a wrong setting.
        FieldMismatchError: another `num_microbatches`, or a replica whose ranks are of several data-parallel ranks.
    """
    for info in calls:
        if info.error is not None:
            kind, message = info.error
            raise error_of(kind, f"{info.place}: {message}")
    first = calls[0]
    size = len(calls) // (1 + max(info.dp_rank for info in calls))
    for index, info in enumerate(calls):
        if info.count != first.count:
            raise FieldMismatchError(
                f"{info.place} was called with num_microbatches={info.count}, {first.place} with {first.count}"
            )
        if info.dp_rank != calls[index - index % max(1, size)].dp_rank:
            raise FieldMismatchError(f"{info.place} shares its replica with {calls[index - index % size].place}")


def error_info(error: BaseException) -> tuple[str, str]:
    """Return an error as a `CallInfo` carries it, cut to fit its bytes."""
    kind, message = named(error)
    return kind, message[: _INFO_BYTES // 6]  # up to four bytes a character, and space for the rest


def named(error: BaseException) -> tuple[str, str]:
    """Return class and message under which an error travels; a wrong setting and the end of the data keep their class."""
    if type(error) is ValueError or isinstance(error, StopIteration):
        return type(error).__name__, str(error)
    return to_wire(error)


def error_of(kind: str, message: str) -> Exception:
    """Return the error that `named` described."""
    known: dict[str, type[Exception]] = {"ValueError": ValueError, "StopIteration": StopIteration}
    return known[kind](message or "the data has ended") if kind in known else from_wire(kind, message)


def _open(store: Any, name: str, rank: int, size: int, timeout: float, share: bool = False) -> Transport | None:
    if size == 1:
        return None
    return HostTransport(open_gloo(store, name, rank, size, timeout), timeout=timeout, share=share)


def _row(info: CallInfo) -> np.ndarray:
    data = msgspec.msgpack.encode(info)
    assert len(data) <= _INFO_BYTES - 4, info
    row = np.zeros(_INFO_BYTES, np.uint8)
    row[:4].view(np.int32)[0] = len(data)
    row[4 : 4 + len(data)] = np.frombuffer(data, np.uint8)
    return row


def _read(row: np.ndarray) -> CallInfo:
    return _INFO.decode(row[4 : 4 + int(row[:4].copy().view(np.int32)[0])].tobytes())
