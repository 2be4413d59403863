"""Errors, field declarations and the sample layout: what every other folder speaks in."""

if __name__ != "evenpack.core":
    raise ImportError("import this folder as evenpack.core: under its bare name a second copy of every class would appear")

from .errors import (
    AmbiguousMediaError,
    CorruptBlockError,
    EvenpackError,
    FieldMismatchError,
    FieldShapeError,
    InfeasiblePlanError,
    MediaMismatchError,
    MissingFieldError,
    OversizeSampleError,
    PeerFailedError,
    PeerLostError,
    PlanError,
    PlanMismatchError,
    SampleError,
    SpelledMediaTokenError,
    UndeclaredFieldError,
    UnsafeModelError,
)
from .fields import Field, FieldSet
from .group import SampleGroup, layout_grids, media_codes, members_of, num_groups_of
from .records import differences, plain
from .rounding import round_up
from .sample import IGNORED, TYPE_CODES, Sample, SampleLayout

__all__ = [
    "IGNORED",
    "TYPE_CODES",
    "AmbiguousMediaError",
    "CorruptBlockError",
    "EvenpackError",
    "Field",
    "FieldMismatchError",
    "FieldSet",
    "FieldShapeError",
    "InfeasiblePlanError",
    "MediaMismatchError",
    "MissingFieldError",
    "OversizeSampleError",
    "PeerFailedError",
    "PeerLostError",
    "PlanError",
    "PlanMismatchError",
    "Sample",
    "SampleError",
    "SampleGroup",
    "SampleLayout",
    "SpelledMediaTokenError",
    "UndeclaredFieldError",
    "UnsafeModelError",
    "differences",
    "layout_grids",
    "media_codes",
    "members_of",
    "num_groups_of",
    "plain",
    "round_up",
]
