"""Errors that users meet, each the same on every rank.

A rank that finds bad input does not raise at once: it says so in the next gather, and every rank raises the same class with
the same message. `to_wire` and `from_wire` are the two ends of that.
"""

from typing import ClassVar


class EvenpackError(Exception):
    """Base of every error that evenpack raises for reasons other than a wrong setting (those are `ValueError`)."""

    _by_name: ClassVar[dict[str, type["EvenpackError"]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        EvenpackError._by_name[cls.__name__] = cls


class SampleError(EvenpackError, ValueError):
    """A sample that cannot be used as it is; the message names the sample, the value and the limit."""


class OversizeSampleError(SampleError):
    """A sample longer than a pack may be, under `oversize="error"`."""


class MissingFieldError(SampleError):
    """A required field that a sample does not have."""


class UndeclaredFieldError(SampleError):
    """A field that neither the adapter nor the user declared."""


class FieldShapeError(SampleError):
    """A field of the wrong rank, length, dtype or type, or with values that are not finite."""


class MediaMismatchError(SampleError):
    """Media tokens and media features of a segment that do not agree in number."""


class AmbiguousMediaError(SampleError):
    """Runs of a media token that match the grids in no way, or in more than one way."""


class SpelledMediaTokenError(SampleError):
    """Text that spells a media token, for a model that cannot be told which ids are anchors."""


class FieldMismatchError(EvenpackError):
    """Ranks that disagree on wire version, settings, or the fields and dtypes of their samples."""


class PlanError(EvenpackError, ValueError):
    """A table of samples that no plan can serve under the given settings."""


class InfeasiblePlanError(PlanError):
    """Constraints that no assignment meets, with the numbers that show it."""


class PeerFailedError(EvenpackError):
    """Another rank (or this one) raised; the message names the rank, the stage and the original error."""


class PeerLostError(PeerFailedError):
    """Another rank stopped answering; the message names it where its heartbeat tells who it was."""


class PlanMismatchError(EvenpackError):
    """Ranks that computed different plans from the same table: versions or machines differ."""


class CorruptBlockError(EvenpackError):
    """A block of bytes that is not the sample it claims to be."""


class UnsafeModelError(EvenpackError, ValueError):
    """A model that would mix the segments of a pack, or ignore an argument that keeps them apart."""


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return the class name and the message under which an error travels to the other ranks."""
    try:
        text = str(error)
    except Exception:  # somebody else's class
        text = "its message cannot be read"
    if isinstance(error, EvenpackError):
        return type(error).__name__, text
    return PeerFailedError.__name__, f"{type(error).__name__}: {text}"


def from_wire(name: str, message: str) -> EvenpackError:
    """Rebuild an error that `to_wire` described; a class unknown here becomes `PeerFailedError`."""
    return EvenpackError._by_name.get(name, PeerFailedError)(message)
