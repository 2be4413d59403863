"""Settings of the planner."""

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import msgspec

Sync = Literal["step", "microbatch"]
Movement = Literal["minimal", "free"]
Oversize = Literal["error", "drop", "truncate"]
Modality = Literal["image", "video", "audio"]

#: Bit of each modality in `SampleTable.media` and `StepPlan.dummy_media`.
MEDIA_BITS: dict[str, int] = {"image": 1, "video": 2, "audio": 4}


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must respect and what it optimises.

    Attributes:
        max_tokens: most padded tokens per GPU and pack; a pack's capacity is `max_tokens * cp_size`.
        sync: where ranks wait: once a step (DDP, ZeRO-1) or in every micro-batch (FSDP, expert parallel).
        num_microbatches: packs per rank and step; None lets the planner choose.
        microbatch_multiple: number of micro-batches is a multiple of this (virtual pipelines).
        microbatch_cost: fixed cost of one micro-batch, in the units of the sample costs.
        pipeline_stages: pipeline-parallel size P; adds (P - 1) times a rank's largest micro-batch at `sync="step"`. With a
            pipeline, a rank's small packs run first and last; without, its packs run heaviest first.
        max_segments: most segments per pack, a tail included; None for no limit.
        tolerance: imbalance, relative to the lower bound, below which samples stay at home.
        movement: keep samples at home where balance allows ("minimal"), or ignore homes ("free").
        oversize: what happens to a sample above the capacity: an error, or it is dropped, or truncated. "drop" also drops
            what a fixed `num_microbatches` cannot hold; the others raise an error there.
        align: multiple to which every segment is padded; None means 2 * cp_size if cp_size > 1, else 1.
        pack_align: multiple to which every pack is padded, itself a multiple of `align`; None means `align`.
    """

    max_tokens: int
    sync: Sync = "step"
    num_microbatches: int | None = None
    microbatch_multiple: int = 1
    microbatch_cost: int = 0
    pipeline_stages: int = 1
    max_segments: int | None = None
    tolerance: float = 0.01
    movement: Movement = "minimal"
    oversize: Oversize = "error"
    align: int | None = None
    pack_align: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "microbatch_multiple", "pipeline_stages"):
            check_int(name, getattr(self, name), 1)
        for name in ("num_microbatches", "max_segments", "align", "pack_align"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_int("microbatch_cost", self.microbatch_cost, 0)
        check_real("tolerance", self.tolerance, 0.0, 1.0)
        for name, kind in (("sync", Sync), ("movement", Movement), ("oversize", Oversize)):
            check_literal(name, getattr(self, name), get_args(kind))
        if self.pack_align is not None and self.pack_align % (self.align or 1):
            raise ValueError(f"pack_align must be a multiple of align={self.align}, got {self.pack_align}")
        if self.num_microbatches is not None and self.num_microbatches % self.microbatch_multiple:
            raise ValueError(
                f"num_microbatches must be a multiple of microbatch_multiple={self.microbatch_multiple}, "
                f"got {self.num_microbatches}"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Build the settings from a plain mapping, as a YAML or JSON file gives it.

        Raises:
            ValueError: a name that is not a setting, or a value of the wrong type or range.
        """
        known = {field.name for field in msgspec.structs.fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(f"unknown settings {unknown}; known ones are {sorted(known)}")
        try:
            return msgspec.convert(dict(settings), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def segment_align(self, cp_size: int) -> int:
        """Multiple to which every segment is padded under `cp_size`."""
        return self.align if self.align is not None else (2 * cp_size if cp_size > 1 else 1)

    def capacity(self, cp_size: int) -> int:
        """Most padded tokens of a pack, and so of a segment: `max_tokens * cp_size` in whole multiples of `pack_align`."""
        pack_align = self.pack_align or self.segment_align(cp_size)
        return self.max_tokens * cp_size // pack_align * pack_align


class MediaTowers(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must know of the model's media towers: it follows from the adapter and the cost model, not from the user.

    Attributes:
        trained: media whose towers are trained: each tower must run on every rank in the last micro-batch.
        shared: groups of media that run through one tower: at `sync="step"` one of them is enough.
        dummy_tokens: tokens of the smallest legal item of a modality.
        dummy_cost: cost per phase of the smallest legal item of a modality; free where a modality is left out.

    Raises:
        ValueError: a modality that is none, or a number out of range.
    """

    trained: tuple[str, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    dummy_tokens: Mapping[str, int] = {}
    dummy_cost: Mapping[str, tuple[int, ...]] = {}

    def __post_init__(self) -> None:
        for modality in self.trained:
            check_literal("trained", modality, get_args(Modality))
        grouped = [modality for group in self.shared for modality in group]
        for modality in grouped:
            check_literal("shared", modality, get_args(Modality))
        if len(set(grouped)) < len(grouped):
            raise ValueError(f"shared must name each modality at most once, got {self.shared}")
        for modality, tokens in self.dummy_tokens.items():
            check_literal("dummy_tokens", modality, get_args(Modality))
            check_int(f"dummy_tokens[{modality!r}]", tokens, 1)
        for modality, costs in self.dummy_cost.items():
            check_literal("dummy_cost", modality, get_args(Modality))
            for cost in costs:
                check_int(f"dummy_cost[{modality!r}]", cost, 0)


#: A model without media.
NO_TOWERS = MediaTowers()


def check_int(name: str, value: object, low: int) -> None:
    """Raise `ValueError` unless `value` is an integer (no bool) of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def check_real(name: str, value: object, low: float, high: float) -> None:
    """Raise `ValueError` unless `value` is a finite number within [low, high]."""
    # NaN is within no limits.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}")


def check_literal(name: str, value: object, options: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
