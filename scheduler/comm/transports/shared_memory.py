"""What the ranks of one node hand each other through memory instead of the network.

A sender writes into a section of its arena and sends the receiver a note where. The receiver looks at the bytes where they
are, and says so in the arena's header once nothing refers to them any more; until then the sender takes another section. When
all but one of them are in use, the notes ask for a copy instead, so that a receiver may keep what it got for as long as
it likes, and never stops a sender.
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path

import numpy as np

from ....core import round_up
from .arena import NUM_SECTIONS, Arena, PeerArena

#: What a note says: number of the section, turn, where the bytes start, and whether they may be looked at for long.
NOTE_BYTES = 4 * 8
_ALIGN = 16
_ROW = np.dtype([("node", "S64"), ("pid", "<i8"), ("fd", "<i8"), ("token", "V16")])


class NodeMemory:
    """Arenas of the ranks that share a node.

    Args:
        arena: this rank's own.
        rank: this rank.
        peers: the arenas of the other ranks of its node.

    Attributes:
        near: the ranks whose arenas are open here; they have this one's open, too.
    """

    def __init__(self, arena: Arena, rank: int, peers: dict[int, PeerArena]) -> None:
        self.near = frozenset(peers)
        self._arena, self._rank, self._peers = arena, rank, peers
        self._turn = 0
        self._chosen = 0
        self._starts: dict[int, int] = {}
        #: Of each section: its last turn, and who got something then.
        self._readers: list[tuple[int, list[int]]] = [(0, [])] * NUM_SECTIONS

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arena."""
        return self._arena.nbytes

    def has_room(self) -> bool:
        """Return whether there is a section that no rank uses."""
        return any(map(self._is_free, range(NUM_SECTIONS)))

    def alloc(self, sizes: Mapping[int, int], keys: Mapping[int, Hashable]) -> dict[int, np.ndarray]:
        """Return room to write for near ranks; only while `has_room`.

        Args:
            sizes: bytes for each of them.
            keys: ranks of one key get the same room.
        """
        at, placed = 0, dict[Hashable, int]()
        for rank, size in sizes.items():
            if keys[rank] not in placed:
                placed[keys[rank]] = at
                at += round_up(size, _ALIGN)
        self._chosen = next(section for section in range(NUM_SECTIONS) if self._is_free(section))
        self._starts = {rank: placed[keys[rank]] for rank in sizes}
        memory = self._arena.take(self._chosen, at)
        return {rank: memory[start : start + sizes[rank]] for rank, start in self._starts.items()}

    def notes(self) -> dict[int, np.ndarray]:
        """Return what to tell every rank for which there was room: int64 `[4]`; from now on they may read."""
        self._turn += 1
        self._readers[self._chosen] = (self._turn, list(self._starts))
        readers = Counter(self._starts.values())
        keep = self.has_room()  # what several ranks read is copied, too: one of them may write to what it got
        return {
            rank: np.array([self._chosen, self._turn, start, keep and readers[start] == 1])
            for rank, start in self._starts.items()
        }

    def read(self, owner: int, note: np.ndarray, size: int, spare: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return what another rank wrote for this one.

        Args:
            owner: that rank.
            note: what that rank sent about it.
            size: bytes to read.
            spare: gives memory of this process, should a copy be needed.

        Returns:
            uint8 `[size]`; its owner waits with the memory until nothing refers to this array or a view of it.
        """
        section, turn, start, keep = note.tolist()
        done, found = self._peers[owner].done, self._peers[owner].read(section, start, size)
        if not keep:
            copied = spare(size)
            np.copyto(copied, found)
            done[section, self._rank] = turn
            return copied
        # A view of a view refers to the array below both. Behind a buffer, what is watched is that array for all further views.
        found = np.frombuffer(found.data, np.uint8)
        weakref.finalize(found, _release, os.getpid(), done, (section, self._rank), turn).atexit = False
        return found

    def close(self) -> None:
        """Give back what the system lends; arrays that still look into an arena stay valid."""
        self._arena.close()
        for peer in self._peers.values():
            peer.close()

    def _is_free(self, section: int) -> bool:
        turn, readers = self._readers[section]
        return bool((self._arena.done[section, readers] >= turn).all())


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
    row, arena = np.zeros(1, _ROW), None
    try:
        node, arena = node_name().encode(), Arena(num_ranks)
        row["node"], row["pid"], row["fd"], row["token"] = node, os.getpid(), arena.fd, np.void(arena.token)
    except OSError:
        pass  # a rank without the name of a node is alone
    rows = gather(row.view(np.uint8)).view(_ROW)[:, 0]
    mates = np.flatnonzero((rows["node"] == rows["node"][rank]) & (rows["node"] != b""))
    peers = _opened(rows, mates[mates != rank].tolist(), num_ranks)
    opened = gather(np.array([peers is not None], np.uint8))[:, 0].astype(bool)
    if arena is None:
        return None
    memory = NodeMemory(arena, rank, peers or {})
    if memory.near and opened[mates].all():
        return memory
    memory.close()
    return None


def node_name() -> str:
    """Return what only processes that see one another's `/proc` have in common: the running kernel and the process namespace.

    Raises:
        OSError: this system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _release(pid: int, done: np.ndarray, place: tuple[int, int], turn: int) -> None:
    """Tell the owner that this process needs its bytes no more; a fork that drops its copy of the array says nothing."""
    if os.getpid() == pid:
        done[place] = turn


def _opened(rows: np.ndarray, ranks: list[int], num_ranks: int) -> dict[int, PeerArena] | None:
    """Open arenas; None where one of them cannot be."""
    peers: dict[int, PeerArena] = {}
    try:
        for rank in ranks:
            pid, fd = int(rows["pid"][rank]), int(rows["fd"][rank])
            peers[rank] = PeerArena(pid, fd, rows["token"][rank].tobytes(), num_ranks)
    except OSError:
        for peer in peers.values():
            peer.close()
        return None
    return peers
