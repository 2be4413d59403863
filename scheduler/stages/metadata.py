"""Metadata that ranks gather: a fixed header, and one fixed-width record of integers per sample."""

from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from ...core import round_up
from ..plan import SampleTable

#: Tensor fields of free dtype whose dtype the header carries; more than any family declares.
MAX_FREE_DTYPES = 16

#: Of the header and the records; the first field of every header, so that any version can read it.
WIRE_VERSION = 4

HEADER = np.dtype(
    [
        ("version", "<u4"),
        ("status", "<i4"),
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


class Status(IntEnum):
    """Status of a rank, in its header."""

    OK = 0
    FAILED = 1
    CLOSED = 2


def record_dtype(num_phases: int) -> np.dtype[np.void]:
    """Return the dtype of a sample's record: 40 bytes with one phase, 8 more with each further one.

    `media` has one bit per modality; `steps_waited` counts the steps that a deferred sample has waited; `list_index` is the
    number of its list in the step, with `scope="microbatch"`; `id_hash` tells whether two samples have one `sample_id`, 0
    where a sample has none.

    Example:
        >>> record_dtype(1).itemsize, record_dtype(2).itemsize
        (40, 48)
    """
    return np.dtype(
        [
            ("tokens", "<i4"),
            ("loss_tokens", "<i4"),
            ("media", "u1"),
            ("steps_waited", "u1"),
            ("list_index", "<u2"),
            ("weight", "<f4"),
            ("nbytes", "<i8"),
            ("id_hash", "<u8"),
            ("cost", "<i8", (num_phases,)),
        ]
    )


def new_header(
    *, status: Status, step: int, format_digest: int, plan_digest: int, count: int = 0, dropped: int = 0,
    truncated: int = 0, message: int = 0,
    exhausted: bool = False, dtypes: bytes = b"",
) -> np.ndarray:  # fmt: skip
    """Return a header, as an array of one element of `HEADER`.

    Args:
        status: whether this rank can go on.
        step: number of the step.
        format_digest: digest of wire version, settings and fields.
        plan_digest: digest of the last plan.
        count: records that follow.
        dropped: samples that a policy dropped since the last header.
        truncated: samples that a policy cut since the last header.
        message: bytes of the error message, where the rank failed.
        exhausted: the source has ended.
        dtypes: code of each free dtype seen so far, 0 for none.
    """
    header = np.zeros(1, HEADER)
    header["version"], header["status"], header["step"] = WIRE_VERSION, status, step
    header["format"], header["plan"] = format_digest, plan_digest
    header["count"], header["dropped"], header["truncated"] = count, dropped, truncated
    header["message"], header["exhausted"] = message, exhausted
    header["dtypes"][0, : len(dtypes)] = np.frombuffer(dtypes, np.uint8)
    return header


def pack_records(header: np.ndarray, records: np.ndarray, slots: int) -> npt.NDArray[np.uint8]:
    """Return one buffer with a header and the first `slots` records, zeros if there are fewer."""
    padded = np.zeros(slots, records.dtype)
    padded[: min(slots, len(records))] = records[:slots]
    return np.concatenate([header.view(np.uint8), padded.view(np.uint8)])


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

    def select(self, keep: np.ndarray) -> "Gathered":
        """Return the records at the given indices or mask, order kept."""
        return msgspec.structs.replace(self, records=self.records[keep], home=self.home[keep])

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
