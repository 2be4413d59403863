"""What the ranks of one node hand each other through memory instead of the network.

A sender writes into an arena of its own and sends the receiver a note where. The receiver looks at the bytes where they are,
and says so in the arena's header once nothing refers to them any more; until then the sender takes another arena. When all
but one of them are looked into, the notes ask for a copy instead, so that a receiver may keep what it got for as long as it
likes, and never stops a sender.
"""

import os
import weakref
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path

import numpy as np

from .arena import Arena, PeerArena

#: One for the step that trains, one for each of two prepared ahead, one to write to, and one that is only copied from.
NUM_ARENAS = 5
#: What a note says: number of the arena, turn, where the bytes start, and whether they may be looked at for long.
NOTE_BYTES = 4 * 8
_ALIGN = 16
_ROW = np.dtype([("node", "S64"), ("pid", "<i8"), ("fds", "<i8", NUM_ARENAS), ("tokens", "V16", NUM_ARENAS)])


class NodeMemory:
    """Arenas of the ranks that share a node.

    Args:
        arenas: this rank's own.
        rank: this rank.
        peers: the arenas of the other ranks of its node.

    Attributes:
        near: the ranks whose arenas are open here; they have this one's open, too.
    """

    def __init__(self, arenas: list[Arena], rank: int, peers: dict[int, list[PeerArena]]) -> None:
        self.near = frozenset(peers)
        self._arenas, self._rank, self._peers = arenas, rank, peers
        self._turn = 0
        self._chosen = 0
        self._starts: dict[int, int] = {}
        #: Of each arena: its last turn, and who got something then.
        self._readers: list[tuple[int, list[int]]] = [(0, [])] * len(arenas)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arenas."""
        return sum(arena.nbytes for arena in self._arenas)

    def has_room(self) -> bool:
        """Return whether there is an arena that nobody needs."""
        return any(map(self._is_free, range(len(self._arenas))))

    def room(self, sizes: Mapping[int, int], keys: Mapping[int, Hashable]) -> dict[int, np.ndarray]:
        """Return room to write for near ranks; only while `has_room`.

        Args:
            sizes: bytes for each of them.
            keys: ranks of one key get the same room.
        """
        at, placed = 0, dict[Hashable, int]()
        for rank, size in sizes.items():
            if keys[rank] not in placed:
                placed[keys[rank]] = at
                at += -(-size // _ALIGN) * _ALIGN
        self._chosen = next(index for index in range(len(self._arenas)) if self._is_free(index))
        self._starts = {rank: placed[keys[rank]] for rank in sizes}
        memory = self._arenas[self._chosen].take(at)
        return {rank: memory[start : start + sizes[rank]] for rank, start in self._starts.items()}

    def notes(self) -> dict[int, np.ndarray]:
        """Return what to tell every rank for which there was room: int64 `[4]`; from now on they may read."""
        self._turn += 1
        self._readers[self._chosen] = (self._turn, list(self._starts))
        keep = self.has_room()
        return {rank: np.array([self._chosen, self._turn, start, keep]) for rank, start in self._starts.items()}

    def read(self, owner: int, note: np.ndarray, size: int, spare: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return what another rank wrote for this one.

        Args:
            owner: that rank.
            note: what it told.
            size: bytes to read.
            spare: gives memory of this process, should a copy be needed.

        Returns:
            uint8 `[size]`; its owner waits with the memory until nothing refers to this array or a view of it.
        """
        index, turn, start, keep = note.tolist()
        arena = self._peers[owner][index]
        found = arena.read(start, size)
        if not keep:
            copied = spare(size)
            np.copyto(copied, found)
            arena.done[self._rank] = turn
            return copied
        # Views of an array refer to the first one that is no view of an array.
        weakref.finalize(found, arena.done.__setitem__, self._rank, turn).atexit = False
        return found

    def close(self) -> None:
        """Give back what the system lends; arrays that still look into an arena stay valid."""
        for arena in self._arenas:
            arena.close()
        for peer in self._peers.values():
            for arena in peer:
                arena.close()

    def _is_free(self, index: int) -> bool:
        turn, readers = self._readers[index]
        return bool((self._arenas[index].done[readers] >= turn).all())


def meet(gather: Callable[[np.ndarray], np.ndarray], rank: int, num_ranks: int) -> NodeMemory | None:
    """Open the arenas of a group's ranks to one another, where they share a node; collective.

    The ranks of a node share memory only if every one of them can open all the others' arenas, so two ranks never disagree.

    Args:
        gather: all-gathers uint8 `[n]` into `[num_ranks, n]`.
        rank: this rank.
        num_ranks: size of the group.

    Returns:
        This rank's view; None where it shares memory with no other.
    """
    row, arenas = np.zeros(1, _ROW), list[Arena]()
    try:
        node = node_name().encode()
        arenas.extend(Arena(num_ranks) for _ in range(NUM_ARENAS))
        row["node"], row["pid"] = node, os.getpid()
        row["fds"], row["tokens"] = [arena.fd for arena in arenas], [np.void(arena.token) for arena in arenas]
    except OSError:
        pass  # a rank without the name of a node is alone
    rows = gather(row.view(np.uint8)).view(_ROW)[:, 0]
    mates = np.flatnonzero((rows["node"] == rows["node"][rank]) & (rows["node"] != b""))
    peers = _opened(rows, mates[mates != rank].tolist(), num_ranks)
    opened = gather(np.array([peers is not None], np.uint8))[:, 0].astype(bool)
    if peers and opened[mates].all():
        return NodeMemory(arenas, rank, peers)
    NodeMemory(arenas, rank, peers or {}).close()
    return None


def node_name() -> str:
    """Return what only processes that see one another's `/proc` have in common: the running kernel and the process namespace.

    Raises:
        OSError: this system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _opened(rows: np.ndarray, ranks: list[int], num_ranks: int) -> dict[int, list[PeerArena]] | None:
    """Open arenas; None where one of them cannot be."""
    peers: dict[int, list[PeerArena]] = {}
    try:
        for rank in ranks:
            peers[rank] = []
            for fd, token in zip(rows["fds"][rank].tolist(), rows["tokens"][rank], strict=True):
                peers[rank].append(PeerArena((int(rows["pid"][rank]), fd), token.tobytes(), num_ranks))
    except OSError:
        for arena in [arena for peer in peers.values() for arena in peer]:
            arena.close()
        return None
    return peers
