"""An attention function for transformers that honours segment boundaries where flash attention cannot run.

It takes the same arguments as flash attention's varlen call (`cu_seq_lens_q`) and runs one
`scaled_dot_product_attention` per segment, so no [T, T] mask is ever built.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...core import UnsafeModelError
from ..adapter import BlockLayers
from .blocks import block_masks
from .plain import plain_attention

#: Name under which the function is registered with transformers.
VARLEN_ATTENTION = "evenpack_varlen"


def register_varlen_attention() -> str:
    """Register the attention function with transformers (again is fine), and return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN_ATTENTION, padding_only_mask)
    return VARLEN_ATTENTION


def padding_only_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Build a mask for rows padded by `attention_mask`, and none for packs: their boundaries do that work.

    Without this, transformers would build a [T, T] mask for every pack whose positions restart. A mask that says more than
    causal order, a window, padding and packing is built as the model asks for it, or refused: it is never left out.

    Raises:
        UnsafeModelError: such a pattern in a row whose positions restart. The installed transformers looks some patterns up by
            positions within a segment, so even the mask that it would build is wrong there.
    """
    from transformers.masking_utils import sdpa_mask

    mask_function = kwargs.get("mask_function")
    pattern = _has_pattern(mask_function, getattr(kwargs.get("config"), "sliding_window", None))
    if attention_mask is None and not pattern:
        return None
    if pattern and _is_packed(mask_function):
        raise UnsafeModelError(
            f"{VARLEN_ATTENTION} is causal within a segment; this model adds a pattern of its own to its mask. Blocks of "
            "tokens that see each other are handed over as media_blocks (ModelAdapter.bidirectional)"
        )
    mask: torch.Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return mask


#: Functions of transformers' masks that say no more than the arguments of `varlen_attention` do.
_PLAIN_MASKS = frozenset({
    "causal_mask_function",
    "bidirectional_mask_function",
    "packed_sequence_mask_function",
    "padding_mask_function",
    "remap_positions_for_packed_sequence",
    "add_offsets_to_mask_function",
    "and_masks",
})  # fmt: skip
_WINDOWS = frozenset({"sliding_window_overlay", "sliding_window_bidirectional_overlay"})


def _has_pattern(mask_function: Any, window: int | None) -> bool:
    """Whether a mask function of transformers says more than causal order, the config's window, padding and packing.

    A function that is not known is such a pattern. A union is one as well, unless it adds blocks of no token.
    """
    if mask_function is None:
        return False
    name, parts = _mask_name(mask_function), _mask_parts(mask_function)
    if name in _WINDOWS:
        return window not in _closed_over(mask_function)
    if name == "or_masks":
        return not all(map(_has_no_block, parts[1:])) or _has_pattern(parts[0], window)
    return name not in _PLAIN_MASKS or any(_has_pattern(part, window) for part in parts)


def _has_no_block(mask_function: Any) -> bool:
    """Whether a mask function is an overlay of blocks that no token belongs to, as in a row of text alone."""
    if _mask_name(mask_function) != "blockwise_overlay":
        return False
    ids = [value for value in _closed_over(mask_function) if isinstance(value, torch.Tensor)]
    return len(ids) == 1 and not bool((ids[0] >= 0).any())


def _is_packed(mask_function: Any) -> bool:
    """Whether a mask function of transformers keeps the segments of a row apart."""
    if _mask_name(mask_function) == "packed_sequence_mask_function":
        return True
    return any(_is_packed(part) for part in _mask_parts(mask_function))


def _mask_name(mask_function: Any) -> str:
    """Return the name of the function of `transformers.masking_utils` that made a mask function; empty for any other."""
    known = getattr(mask_function, "__module__", None) == "transformers.masking_utils"
    return str(mask_function.__qualname__).partition(".")[0] if known else ""


def _mask_parts(mask_function: Any) -> list[Any]:
    """Return the mask functions that a mask function is made of."""
    inner = [one for value in _closed_over(mask_function) for one in (value if isinstance(value, tuple | list) else [value])]
    return [one for one in inner if callable(one) and not isinstance(one, torch.Tensor)]


def _closed_over(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


# The number of segments and their lengths are data: a graph that held them would be compiled for every pack.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    key_index: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    media_blocks: torch.Tensor | None = None,
    media_block_layers: BlockLayers = "all",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each segment.

    Args:
        module: the attention layer; `is_causal` is read from it where the argument is None.
        query: [B, H, T, D]; B is 1 where boundaries are given.
        key: [B, H_kv, T, D].
        value: [B, H_kv, T, D_v].
        attention_mask: mask of an unpacked, padded batch; must be None where boundaries are given.
        scaling: factor of the scores, default 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        is_causal: False for vision towers.
        cu_seq_lens_q: integers [S + 1], boundaries of the row; None for a batch that is not packed.
        cu_seq_lens_k: integers [S + 1], boundaries of what each segment sees in `key_index`; not read without it.
        key_index: integers [K], the tokens that each segment sees, its own last; None where it sees its own alone.
        sliding_window: how many tokens back, itself included, a token sees.
        position_ids: text positions, [1, T]; read only to refuse a pack that comes without boundaries.
        softcap: cap of the scores.
        s_aux: attention sinks, one score per head.
        media_blocks: integers [1, T]: tokens of a segment with one number see each other, whichever comes first; -1 for those
            that see no later token. Attention is causal otherwise, whatever the layer says.
        media_block_layers: how they meet the window: "all" keeps the window, "sliding" too and does without blocks in layers
            without a window, "beyond" lets a block reach beyond the window.

    Returns:
        The output [B, T, H, D_v], and None in place of the weights.

    Raises:
        UnsafeModelError: a pack without boundaries, boundaries or blocks that do not fit the row, or a position bias, which
            this function does not compute.
    """
    if kwargs.get("position_bias") is not None:
        raise UnsafeModelError(f"{VARLEN_ATTENTION} does not compute position_bias, which {type(module).__name__} uses")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    causal = causal or media_blocks is not None
    lengths = _segment_lengths(query, key.shape[2], attention_mask, cu_seq_lens_q, position_ids, causal)
    parts = [(query, key, value)]
    masks: Sequence[torch.Tensor | None] = [attention_mask]
    if media_blocks is not None:
        lengths, masks = _with_blocks(query, lengths, media_blocks, sliding_window, media_block_layers)
    elif lengths is not None:
        masks = [None] * len(lengths)
    if lengths is not None:
        key, value, seen = _seen(key, value, lengths, cu_seq_lens_k, key_index)
        sizes = (lengths, seen, seen)
        parts = list(
            zip(*(torch.split(x, size, dim=2) for x, size in zip((query, key, value), sizes, strict=True)), strict=True)
        )
    outputs = [
        _attend(q, k, v, mask, scaling, dropout, causal, sliding_window, softcap, s_aux)
        for (q, k, v), mask in zip(parts, masks, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _segment_lengths(
    query: torch.Tensor,
    num_keys: int,
    attention_mask: torch.Tensor | None,
    boundaries: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    causal: bool,
) -> list[int] | None:
    """Return the segments' lengths, None for a batch that is not packed."""
    size = query.shape[2]
    if boundaries is None:
        if attention_mask is None and _restarts(position_ids):
            raise UnsafeModelError("position ids restart inside the row, but cu_seq_lens_q is not given: segments would mix")
        return None
    lengths = lengths_of(boundaries)
    fits = sum(lengths) == size == num_keys and query.shape[0] == 1
    if fits and attention_mask is None:
        return lengths
    if not causal and not fits:
        return None  # boundaries of the text row that some versions hand on to the vision tower, which splits its own
    raise UnsafeModelError(
        f"boundaries of {sum(lengths)} tokens for a batch of {query.shape[0]} rows of {size} tokens and {num_keys} keys"
        f"{'' if attention_mask is None else ' with an attention mask'}"
    )


def _seen(
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    boundaries: torch.Tensor | None,
    index: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the keys and values that each segment sees, and how many they are."""
    if index is None:
        return key, value, lengths
    seen = [] if boundaries is None else lengths_of(boundaries)
    if len(seen) != len(lengths) or sum(seen) != len(index) or any(k < q for k, q in zip(seen, lengths, strict=True)):
        raise UnsafeModelError(f"key_index of {len(index)} tokens and boundaries of {sum(seen)} for {len(lengths)} segments")
    return key[:, :, index], value[:, :, index], seen


def lengths_of(boundaries: torch.Tensor) -> list[int]:
    """Return the lengths of the segments that are not empty.

    They are kept on the tensor, so that all layers together cost one copy to the host.
    """
    lengths: list[int] | None = getattr(boundaries, "_evenpack_lengths", None)
    if lengths is None:
        lengths = [length for length in boundaries.diff().tolist() if length]
        boundaries._evenpack_lengths = lengths  # type: ignore[attr-defined]
    return lengths


def _with_blocks(
    query: torch.Tensor, lengths: list[int] | None, blocks: torch.Tensor, window: int | None, layers: BlockLayers
) -> tuple[list[int], Sequence[torch.Tensor | None]]:
    """Return the lengths of the segments, and who sees whom in those that have a block."""
    if lengths is None or blocks.shape != (1, query.shape[2]):
        raise UnsafeModelError(
            f"media_blocks of shape {list(blocks.shape)} for a batch of {query.shape[0]} rows of {query.shape[2]} tokens"
            f"{'; they need the boundaries of segments (cu_seq_lens_q)' if lengths is None else ''}"
        )
    return lengths, block_masks(blocks, lengths, window, layers)


def _restarts(position_ids: torch.Tensor | None) -> bool:
    """Whether text positions of a single row say that it is a pack."""
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[0] != 1:
        return False
    return bool((position_ids[0].diff() <= 0).any())


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within one segment, [B, H, L, D]."""
    size, keys = query.shape[2], key.shape[2]
    written_out = softcap is not None or sinks is not None
    if mask is None and causal and (written_out or size != keys or (window is not None and window < size)):
        mask = _causal_mask(size, keys, window, query.device)
    elif mask is None and not causal and window is not None and window < size:
        places = torch.arange(size, device=query.device)
        mask = (places[:, None] - places).abs() <= window
    if written_out:
        return plain_attention(query, key, value, mask, scaling, dropout, softcap, sinks)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=causal and mask is None and size > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _causal_mask(size: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return who sees whom, bool [size, keys]: the last query is the last key (a cache may hold earlier keys)."""
    behind = torch.arange(keys - size, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = behind >= 0
    return seen if window is None else seen & (behind < window)
