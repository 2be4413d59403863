"""What segments and rows must be multiples of, from the parallel layout and the FP8 recipe."""

from typing import Literal, NamedTuple, get_args

Fp8Recipe = Literal["tensorwise", "mxfp8", "blockwise", "nvfp4"]

#: Tokens that a rank's matrix multiplications need a multiple of, by recipe.
_FP8_TOKENS: dict[str, int] = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}


class Alignment(NamedTuple):
    """Settings of `pack_samples` and of the scheduler."""

    align: int
    pack_align: int


def pack_alignment(
    *, cp_size: int = 1, tp_size: int = 1, sequence_parallel: bool = False, fp8: Fp8Recipe | None = None
) -> Alignment:
    """Return `align` (of each segment) and `pack_align` (of the row).

    A segment is cut into 2 * cp_size chunks; with sequence parallelism a rank's tokens are cut by tp_size once more. An FP8
    recipe asks only that the tokens of each rank, not of each segment, are a multiple of its block, so it pads the row once.

    Args:
        cp_size: context-parallel size.
        tp_size: tensor-parallel size; matters with sequence parallelism only.
        sequence_parallel: whether activations between tensor-parallel blocks are cut along the sequence.
        fp8: recipe: "tensorwise" (delayed or current scaling), "mxfp8", "blockwise" or "nvfp4"; None without FP8.

    Raises:
        ValueError: a size below 1, or an unknown recipe.

    Example:
        >>> pack_alignment(cp_size=4, tp_size=8, fp8="blockwise")
        Alignment(align=8, pack_align=512)
        >>> pack_alignment(cp_size=4, tp_size=8, sequence_parallel=True, fp8="blockwise")
        Alignment(align=64, pack_align=4096)
    """
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"sizes must be at least 1, got cp_size={cp_size}, tp_size={tp_size}")
    if fp8 is not None and fp8 not in _FP8_TOKENS:
        raise ValueError(f"fp8 must be None or one of {get_args(Fp8Recipe)}, got {fp8!r}")
    parts = tp_size if sequence_parallel else 1
    align = (2 * cp_size if cp_size > 1 else 1) * parts
    if fp8 is None:
        return Alignment(align, align)
    # Blocks are even, so a multiple of block * cp_size * parts is one of align too.
    return Alignment(align, _FP8_TOKENS[fp8] * cp_size * parts)
