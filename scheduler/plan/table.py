"""The table of a step: one integer row per sample, the same on every rank."""

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ...core import round_up

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
IntsLike = npt.ArrayLike


class SampleTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the planner knows of the samples of one step; row i is sample i.

    Attributes:
        tokens: `[N]` int64, real tokens.
        padded: `[N]` int64, tokens after padding to `align`.
        nbytes: `[N]` int64, size of the sample's block on the wire, in bytes.
        home: `[N]` int64, rank whose source produced the sample.
        media: `[N]` int64, bit flags of the media it carries: 1 image, 2 video, 4 audio.
        loss_tokens: `[N]` int64, targets that count in the loss.
        cost: `[N]` or `[N, K]` int64, cost per phase, in any one unit.

    Example:
        >>> table = SampleTable.from_lengths([5, 3, 9], align=4, home=[0, 0, 1])
        >>> table.padded.tolist(), table.cost.tolist(), len(table)
        ([8, 4, 12], [5, 3, 9], 3)
    """

    tokens: Ints
    padded: Ints
    nbytes: Ints
    home: Ints
    media: Ints
    loss_tokens: Ints
    cost: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_lengths(
        cls,
        tokens: IntsLike,
        *,
        align: int = 1,
        padded: IntsLike | None = None,
        cost: IntsLike | None = None,
        home: IntsLike | None = None,
        media: IntsLike | None = None,
        nbytes: IntsLike | None = None,
        loss_tokens: IntsLike | None = None,
    ) -> Self:
        """Build a table from lengths, with defaults for the rest.

        Args:
            tokens: `[N]`, real tokens.
            align: multiple to which each sample is padded where `padded` is not given.
            padded: `[N]`; default `tokens` rounded up to `align`.
            cost: `[N]` or `[N, K]`; default `tokens`.
            home: `[N]`; default rank 0.
            media: `[N]`; default none.
            nbytes: `[N]`; default 8 bytes a token.
            loss_tokens: `[N]`; default `tokens`.
        """
        real = as_ints(tokens)
        zeros = np.zeros_like(real)

        def column(values: IntsLike | None, default: Ints) -> Ints:
            return default if values is None else as_ints(values)

        return cls(
            tokens=real,
            padded=column(padded, round_up(real, align)),
            nbytes=column(nbytes, 8 * real),
            home=column(home, zeros),
            media=column(media, zeros),
            loss_tokens=column(loss_tokens, real),
            cost=column(cost, real),
        )

    def select(self, keep: npt.NDArray[Any]) -> "SampleTable":
        """Return the samples at the given indices or mask, in that order."""
        return type(self)(**{name: getattr(self, name)[keep] for name in self.__struct_fields__})

    @classmethod
    def concatenate(cls, tables: Sequence[Self]) -> Self:
        """Stack tables, in order."""
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in cls.__struct_fields__})


def as_ints(values: Any, *, copy: bool = True) -> Ints:
    """Convert to int64 and refuse what int64 would change (fractions, NaN).

    Args:
        values: anything that numpy takes for an array.
        copy: False gives the array itself where it is what kernels are compiled for: int64, contiguous, writable.

    Raises:
        ValueError: a value that is not an integer.
    """
    array = np.asarray(values)
    copy = copy or not (array.flags.c_contiguous and array.flags.writeable)
    if array.size == 0:
        return array.astype(np.int64, copy=copy)
    if array.dtype.kind == "f":
        broken = np.flatnonzero(~np.isfinite(array.ravel()) | (array.ravel() != np.floor(array.ravel())))
        if len(broken):
            raise ValueError(f"the planner takes integers, got {array.ravel()[broken[0]]!r} at position {broken[0]}")
    elif array.dtype.kind not in "iub":
        raise ValueError(f"the planner takes integers, got an array of {array.dtype}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"the planner takes int64, got {array.max()}, above {np.iinfo(np.int64).max}")
    return array.astype(np.int64, copy=copy)
