"""Fields as data: what a sample may hold, declared once and read by every stage of the flow.

An adapter declares the fields of its family, a user adds their own; describe, exchange, pack and `forward_kwargs` all read
that one declaration. There are three kinds:

- ``token``: one value per token, laid end to end in a pack, with a pad value (`labels`, `advantages`, ...);
- ``media``: rows that belong to media items, concatenated in segment order (`pixel_values`, `image_grid_thw`, ...);
- ``sample``: one value per sample, a list per pack (`sample_id`, a reward, a caption).
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Literal, Self, get_args

import msgspec
import torch

Kind = Literal["token", "media", "sample"]
Rows = Literal["patches", "items", "tiles", "sample", "free"]

#: Dtypes of a field that are a family of tensor dtypes, or no tensor at all.
FLOAT, ANY, TEXT, ID = "float", "any", "text", "id"

#: Every tensor dtype that travels, in the order of its code on the wire (code = index + 1; 0 = absent).
TENSOR_DTYPES: tuple[str, ...] = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
    "uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one field of a sample.

    Attributes:
        name: key in the sample's mapping.
        kind: "token", "media" or "sample".
        dtype: name of a torch dtype, or "float" (any floating dtype), "any" (any tensor), "text" (a string),
            "id" (a string or an integer).
        shape: sizes besides the packed axis, None where a size is free; None leaves rank and sizes unchecked.
        axis: packed axis; media rows of some families lie behind a batch axis of 1.
        required: absent is an error. A field that is not required takes `default` where a sample lacks it.
        default: value of an absent field: a fill value for tokens, the value itself per sample; None leaves a
            per-sample field None, and a token field to the rule that derives it (`labels`, `mm_token_type_ids`).
        pad: value of a token field at padding, and of a media field where its free sizes are filled up to the largest of a
            pack.
        modality: media field: the modality whose items its rows belong to.
        rows: media field: one row per patch of a grid (t * h * w), per item, per tile (t of the item's grid), one per sample
            that has items, or a number that nothing else says ("free"; only such a field may be absent where items are).
        to_model: whether `forward_kwargs` offers the packed field to the model.

    Example:
        >>> Field(name="advantages", kind="token", dtype="float32", default=0.0).pad
        0
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int | None, ...] | None = ()
    axis: int = 0
    required: bool = False
    default: int | float | str | None = None
    pad: int | float = 0
    modality: Literal["image", "video", "audio"] | None = None
    rows: Rows = "items"
    to_model: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a field's name must be an identifier, got {self.name!r}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"field {self.name!r}: kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if self.dtype not in (*TENSOR_DTYPES, FLOAT, ANY, TEXT, ID):
            raise ValueError(f"field {self.name!r}: unknown dtype {self.dtype!r}")
        if self.dtype in (TEXT, ID) and self.kind != "sample":
            raise ValueError(f"field {self.name!r}: dtype {self.dtype!r} needs kind 'sample', got {self.kind!r}")
        if (self.kind == "media") != (self.modality is not None):
            raise ValueError(f"field {self.name!r}: media fields, and only they, name a modality")

    @property
    def is_tensor(self) -> bool:
        """Whether values of this field are tensors."""
        return self.dtype not in (TEXT, ID)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of `dtype` may be a value of this field."""
        if self.dtype == FLOAT:
            return dtype.is_floating_point
        return self.dtype == ANY or dtype_name(dtype) == self.dtype


class FieldSet(msgspec.Struct, frozen=True, dict=True):
    """The declared fields of a sample, in declaration order, by unique name."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"fields declared twice: {twice}")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Field:
        return self._by_name[name]

    def of_kind(self, kind: Kind) -> tuple[Field, ...]:
        """Return the fields of one kind, in declaration order."""
        return self._by_kind[kind]

    @functools.cached_property
    def _by_name(self) -> dict[object, Field]:
        return {field.name: field for field in self.fields}

    @functools.cached_property
    def _by_kind(self) -> dict[str, tuple[Field, ...]]:
        return {kind: tuple(field for field in self.fields if field.kind == kind) for kind in get_args(Kind)}

    def extended(self, more: Iterable[Field]) -> Self:
        """Return this set with further fields.

        Raises:
            ValueError: a name that is declared already.
        """
        return type(self)((*self.fields, *more))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the `torch.` prefix.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name in `TENSOR_DTYPES`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
