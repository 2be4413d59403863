"""Records end to end in a file, such that a file that was cut off or damaged anywhere can be read around the damage.

A file begins with `PREAMBLE`. A frame is a marker, the payload's length, a checksum over both, and the payload.
"""

import struct
import zlib
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path

#: Version of the frames and of the records in them.
FORMAT_VERSION = 1
_MAGIC = b"evenpack run"
PREAMBLE = _MAGIC + struct.pack("<I", FORMAT_VERSION)
_MARKER = b"\xe5EVP"
_HEAD = struct.Struct("<4sII")


def frame(payload: bytes) -> bytes:
    """Return a payload with its frame.

    Example:
        >>> len(frame(b"abc"))
        15
    """
    return _HEAD.pack(_MARKER, len(payload), _checksum(payload)) + payload


def read_frames(path: Path, damage: list[str]) -> Iterator[bytes]:
    """Yield the payloads of a file, in order.

    Args:
        path: the file.
        damage: gets one line for each part that cannot be read: a tail that was cut off, or bytes that changed.

    Raises:
        ValueError: not a run log, or one of another version.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if size < len(PREAMBLE):
        damage.append(f"{path}: {size} bytes, cut off before the first record")
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        _check_preamble(path, data[: len(PREAMBLE)])
        at = len(PREAMBLE)
        while at < len(data):
            payload = _payload(data, at)
            if payload is not None:
                yield payload
                at += _HEAD.size + len(payload)
                continue
            following = _next_frame(data, at + 1)
            lost = (len(data) if following is None else following) - at
            what = "the last record is cut off" if following is None else "damaged records"
            damage.append(f"{path}: {what}: {lost} bytes at {at} are not read")
            if following is None:
                return
            at = following


def _check_preamble(path: Path, found: bytes) -> None:
    if not found.startswith(_MAGIC):
        raise ValueError(f"{path} is not a run log")
    version = struct.unpack("<I", found[len(_MAGIC) :])[0]
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} is a run log of version {version}, this is version {FORMAT_VERSION}")


def _payload(data: mmap, at: int) -> bytes | None:
    """Return the payload of the frame at a position; None where there is no whole, unchanged one."""
    if at + _HEAD.size > len(data):
        return None
    marker, length, checksum = _HEAD.unpack_from(data, at)
    if marker != _MARKER or at + _HEAD.size + length > len(data):
        return None
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    return payload if _checksum(payload) == checksum else None


def _next_frame(data: mmap, at: int) -> int | None:
    while (at := data.find(_MARKER, at)) >= 0:
        if _payload(data, at) is not None:
            return at
        at += 1
    return None


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))
