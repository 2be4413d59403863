"""Gather: all-gather every rank's status and metadata; all take the same decision, and none waits for one that failed."""

import hashlib

import msgspec
import numpy as np

from ...core import EvenpackError, FieldMismatchError, PeerFailedError, PlanMismatchError
from ...core.errors import from_wire, to_wire
from ...core.fields import TENSOR_DTYPES
from ..comm.transports import Transport
from .metadata import HEADER, WIRE_VERSION, Gathered, Status, new_header, pack_records

#: Longest error message that travels, in bytes.
MAX_MESSAGE = 2000


class RankState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a rank contributes to a gather.

    Attributes:
        step: number of the step.
        records: `[n]` of `metadata.record_dtype`, its samples.
        exhausted: whether its source has ended.
        dropped: samples that a policy dropped since the last gather.
        truncated: samples that a policy cut since the last gather.
        error: what made it fail, None where it can go on.
        plan_digest: digest of its last plan.
        dtypes: dtype codes of its fields of free dtype.
        free_fields: their names.
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
        header = new_header(
            status=Status.OK if state.error is None else Status.FAILED,
            step=state.step,
            format_digest=self._format,
            plan_digest=state.plan_digest,
            count=0 if state.error is not None else len(state.records),
            dropped=state.dropped,
            truncated=state.truncated,
            message=len(message),
            exhausted=state.exhausted,
            dtypes=state.dtypes,
        )
        everyone = self._transport.gather(pack_records(header, state.records, self._slots))
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
        rows, home = self._collect(headers, everyone[:, HEADER.itemsize :], state.records)
        codes = headers["dtypes"].max(axis=0)
        dtypes = {name: TENSOR_DTYPES[code - 1] for name, code in zip(state.free_fields, codes.tolist(), strict=False) if code}
        return Gathered(
            rows, home, headers["exhausted"] != 0, int(headers["dropped"].sum()), int(headers["truncated"].sum()), dtypes
        )

    def _collect(self, headers: np.ndarray, first: np.ndarray, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = headers["count"].astype(np.int64)
        parts = [first.copy().view(mine.dtype)]
        most = int(counts.max(initial=0))
        if most > self._slots:
            rest = np.zeros(most - self._slots, mine.dtype)
            rest[: max(0, len(mine) - self._slots)] = mine[self._slots :]
            parts.append(self._transport.gather(rest.view(np.uint8)).copy().view(mine.dtype))
            # The next step is likely as large; every rank sees the same counts, so all change alike.
            self._slots = most
        full = np.concatenate(parts, axis=1)
        rows = np.concatenate([full[rank, :count] for rank, count in enumerate(counts)])
        return rows, np.repeat(np.arange(len(counts)), counts)

    def _raise_failures(self, headers: np.ndarray, message: bytes) -> None:
        failed = np.flatnonzero(headers["status"] == Status.FAILED)
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
