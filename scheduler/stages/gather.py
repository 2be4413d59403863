"""Gather: all-gather every rank's status and metadata; all take the same decision, and none waits for one that failed."""

import hashlib

import msgspec
import numpy as np

from ...core import EvenpackError, FieldMismatchError, PeerFailedError, PlanMismatchError, round_up
from ...core.errors import from_wire, to_wire
from ...core.fields import TENSOR_DTYPES
from ..comm.transports import Transport
from ..plan import SampleTable
from .describe import MAX_FREE_DTYPES

#: Longest error message that travels, in bytes.
MAX_MESSAGE = 2000

#: Of the header and the records; the first field of every header, so that any version can read it.
WIRE_VERSION = 5

HEADER = np.dtype(
    [
        ("version", "<u4"),
        ("failed", "<i4"),
        ("step", "<i8"),
        ("format", "<u8"),
        ("plan", "<u8"),
        ("count", "<i4"),
        ("dropped", "<i4"),
        ("truncated", "<i4"),
        ("message", "<i4"),
        ("exhausted", "<i4"),
        ("dtypes", "u1", MAX_FREE_DTYPES),
    ]
)


class RankState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a rank contributes to a gather.

    Attributes:
        step: number of the step.
        records: `[n]` of `describe.record_dtype`, its samples.
        exhausted: whether its source has ended.
        dropped: samples that a policy dropped since the last gather.
        truncated: samples that a policy cut since the last gather.
        error: what made it fail, None where it can go on.
        plan_digest: digest of its last plan.
        dtypes: dtype codes of its fields of free dtype.
        free_fields: their names.
        slots: records that travel with the header; None for as many as the largest step so far had. Equal on all ranks.
    """

    step: int
    records: np.ndarray
    exhausted: bool = False
    dropped: int = 0
    truncated: int = 0
    error: BaseException | None = None
    plan_digest: int = 0
    dtypes: bytes = b""
    free_fields: tuple[str, ...] = ()
    slots: int | None = None


class Gathered(msgspec.Struct, frozen=True, eq=False):
    """The records of all ranks, in (rank, sample) order: the table of the step.

    Attributes:
        records: `[N]` of `record_dtype`.
        home: int64 `[N]`, rank of each record.
        exhausted: bool `[R]`, ranks whose source has ended.
        dropped: samples that policies dropped on all ranks.
        truncated: samples that policies cut on all ranks.
        dtypes: field of free dtype to the dtype that the group's samples have, where one was seen.
    """

    records: np.ndarray
    home: np.ndarray
    exhausted: np.ndarray
    dropped: int
    truncated: int = 0
    dtypes: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.records)

    def counts(self, num_ranks: int) -> np.ndarray:
        """Return int64 `[R]`, records of each rank."""
        return np.bincount(self.home, minlength=num_ranks)

    def group_column(self, name: str) -> np.ndarray:
        """Return a column that only records of groups have, int64 `[N]`; for samples alone, every record is one."""
        if name in (self.records.dtype.names or ()):
            return self.records[name].astype(np.int64)
        if name == "num_trained":
            return (self.records["loss_tokens"] > 0).astype(np.int64)
        if name == "tokens_squared":
            return self.records["tokens"].astype(np.int64) ** 2
        return np.ones(len(self.records), np.int64)

    def select(self, keep: np.ndarray) -> "Gathered":
        """Return the records at the given indices or mask, order kept."""
        return msgspec.structs.replace(self, records=self.records[keep], home=self.home[keep])

    def after(self, earlier: "Gathered") -> "Gathered":
        """Return these records behind earlier ones of the same ranks."""
        home = np.concatenate([earlier.home, self.home])
        order = np.argsort(home, kind="stable")
        records = np.concatenate([earlier.records, self.records])[order]
        return msgspec.structs.replace(self, records=records, home=home[order])

    @property
    def media_dtype(self) -> str:
        """Name of the dtype of the group's pixels, which dummy media take too."""
        return self.dtypes.get("pixel_values") or self.dtypes.get("pixel_values_videos") or "float32"

    def table(self, align: int) -> SampleTable:
        """Return the planner's table, samples padded to `align`."""
        tokens = self.records["tokens"].astype(np.int64)
        return SampleTable(
            tokens=tokens,
            padded=round_up(tokens, align),
            nbytes=self.records["nbytes"].astype(np.int64),
            home=self.home,
            media=self.records["media"].astype(np.int64),
            loss_tokens=self.records["loss_tokens"].astype(np.int64),
            cost=self.records["cost"].astype(np.int64),
        )


class Gatherer:
    """All-gathers the metadata of a step: one collective in the common case.

    The header and slots for the usual number of records travel together. If a rank has more records, or has failed, every rank
    sees it in the headers and joins one more collective.

    Args:
        transport: collectives of the group.
        format_digest: digest of settings, fields and versions, equal on all ranks.
        slots: records that travel with the header.
    """

    def __init__(self, transport: Transport, *, format_digest: int, slots: int) -> None:
        self._transport = transport
        self._base = self._format = format_digest
        self._slots = slots

    def amend(self, changed: bytes) -> None:
        """Include what has changed since the start in the settings that ranks compare; empty if nothing has."""
        self._format = digest_of(self._base.to_bytes(8, "little"), changed) if changed else self._base

    def __call__(self, state: RankState) -> Gathered:
        """Gather the records of all ranks.

        Raises:
            EvenpackError: a rank failed, or ranks disagree; the same error on every rank.
            TransportError: timed out waiting for a rank, or lost it.
        """
        message = _message(state.error)
        slots = self._slots if state.slots is None else state.slots
        everyone = self._transport.gather(self._packed(state, len(message), slots))
        headers = everyone[:, : HEADER.itemsize].copy().view(HEADER)[:, 0]
        _check_version(headers)
        try:
            self._raise_failures(headers, message)
        except EvenpackError as error:
            mine = state.error  # on the rank that failed, the original is at hand
            if mine is not None and type(mine) is type(error) and str(mine) == str(error):
                raise mine from mine.__cause__  # itself, as its own cause it would be shown twice
            raise error from mine
        _check_agreement(headers, state.free_fields)
        rows, home = self._collect(headers, everyone[:, HEADER.itemsize :], state.records, slots)
        if state.slots is None:  # the next step is likely as large; every rank sees the same counts, so all change alike
            self._slots = max(slots, int(headers["count"].max(initial=0)))
        codes = headers["dtypes"].max(axis=0)
        dtypes = {name: TENSOR_DTYPES[code - 1] for name, code in zip(state.free_fields, codes.tolist(), strict=False) if code}
        return Gathered(
            rows, home, headers["exhausted"] != 0, int(headers["dropped"].sum()), int(headers["truncated"].sum()), dtypes
        )

    def _packed(self, state: RankState, message: int, num_slots: int) -> np.ndarray:
        """Return what a rank sends first: its header, and its first records in as many slots as every rank has."""
        header, slots = np.zeros(1, HEADER), np.zeros(num_slots, state.records.dtype)
        failed = state.error is not None
        columns = {
            "version": WIRE_VERSION,
            "failed": failed,
            "step": state.step,
            "format": self._format,
            "plan": state.plan_digest,
            "count": 0 if failed else len(state.records),
            "dropped": state.dropped,
            "truncated": state.truncated,
            "message": message,
            "exhausted": state.exhausted,
        }
        for name, value in columns.items():
            header[name] = value
        header["dtypes"][0, : len(state.dtypes)] = np.frombuffer(state.dtypes, np.uint8)
        slots[: len(state.records)] = state.records[:num_slots]
        return np.concatenate([header.view(np.uint8), slots.view(np.uint8)])

    def _collect(self, headers: np.ndarray, first: np.ndarray, mine: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
        counts = headers["count"].astype(np.int64)
        parts = [first.copy().view(mine.dtype)]
        most = int(counts.max(initial=0))
        if most > slots:
            rest = np.zeros(most - slots, mine.dtype)
            rest[: max(0, len(mine) - slots)] = mine[slots:]
            parts.append(self._transport.gather(rest.view(np.uint8)).copy().view(mine.dtype))
        full = np.concatenate(parts, axis=1)
        rows = np.concatenate([full[rank, :count] for rank, count in enumerate(counts)])
        return rows, np.repeat(np.arange(len(counts)), counts)

    def _raise_failures(self, headers: np.ndarray, message: bytes) -> None:
        failed = np.flatnonzero(headers["failed"])
        if not len(failed):
            return
        buffer = np.zeros(int(headers["message"].max()), np.uint8)
        buffer[: len(message)] = np.frombuffer(message, np.uint8)
        texts = self._transport.gather(buffer)
        rank = int(failed[0])
        name, _, text = texts[rank].tobytes().rstrip(b"\0").decode(errors="replace").partition("\n")
        error = from_wire(name, text)
        if isinstance(error, PeerFailedError):
            others = f" (ranks {failed[1:].tolist()} failed too)" if len(failed) > 1 else ""
            raise type(error)(f"rank {rank} failed at step {int(headers['step'][rank])}: {text}{others}")
        raise error


def digest_of(*parts: bytes) -> int:
    """Return a 64-bit digest of byte strings, unambiguous in where one ends."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little")


def _message(error: BaseException | None) -> bytes:
    if error is None:
        return b""
    name, text = to_wire(error)
    # A file name may hold bytes that are no text.
    return f"{name}\n{text}".encode(errors="backslashreplace")[:MAX_MESSAGE].decode(errors="ignore").encode()


def _check_version(headers: np.ndarray) -> None:
    for rank, version in enumerate(headers["version"].tolist()):
        if version != WIRE_VERSION:
            raise FieldMismatchError(
                f"rank {rank} has wire version {version}, this rank has {WIRE_VERSION}: install one version on all ranks"
            )


def _check_agreement(headers: np.ndarray, free_fields: tuple[str, ...]) -> None:
    for what, error, hint in (
        ("format", FieldMismatchError, "settings, fields or versions differ between ranks"),
        ("step", PlanMismatchError, "ranks are at different steps"),
        ("plan", PlanMismatchError, "ranks planned the last step differently; versions or machines differ"),
    ):
        _check_equal(headers[what], what, error, hint)
    for position, name in enumerate(free_fields):
        codes = headers["dtypes"][:, position]
        seen = [(rank, int(code)) for rank, code in enumerate(codes) if code]
        if len({code for _, code in seen}) > 1 or any(code > len(TENSOR_DTYPES) for _, code in seen):
            listing = ", ".join(f"rank {rank}: {_dtype_text(code)}" for rank, code in seen)
            raise FieldMismatchError(f"field {name!r} has several dtypes: {listing}")


def _check_equal(values: np.ndarray, what: str, error: type[EvenpackError], hint: str) -> None:
    different = np.flatnonzero(values != values[0])
    if len(different):
        rank = int(different[0])
        raise error(f"{hint}: {what} is {int(values[0]):#x} on rank 0 and {int(values[rank]):#x} on rank {rank}")


def _dtype_text(code: int) -> str:
    return TENSOR_DTYPES[code - 1] if code <= len(TENSOR_DTYPES) else "more than one"
