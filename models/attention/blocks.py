"""Blocks of tokens that see each other both ways, such as those of an image in Gemma 3: which they are, and who sees whom."""

from collections.abc import Sequence

import torch

from ...core import UnsafeModelError
from ..adapter import BlockLayers, ModelAdapter

_MASKS = "_evenpack_block_masks"
#: Type of the tokens of a prefix, in the field by which PaliGemma's processor says so.
_PREFIX = 0


def media_blocks(
    adapter: ModelAdapter,
    *,
    input_ids: torch.Tensor,
    types: torch.Tensor,
    segment_ids: torch.Tensor,
    labels: torch.Tensor,
    padding: torch.Tensor,
    token_type_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the block of each token of a row, as `varlen_attention` takes them; nothing waits for a device.

    Args:
        adapter: the family, whose `bidirectional` says what a block is.
        input_ids: int64 [1, T].
        types: int64 [1, T]: 1 and 2 at tokens that anchor features of images and videos.
        segment_ids: integers [1, T], ascending.
        labels: int64 [1, T], shifted targets; -100 where nothing is learned.
        padding: bool [1, T], True at padding.
        token_type_ids: integers [1, T]: 0 in the prefix; None to go by the targets.

    Returns:
        int64 [1, T], -1 at tokens of no block.
    """
    first = torch.ones_like(padding)
    first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    if adapter.bidirectional == "prefix":
        if token_type_ids is not None:
            inside = token_type_ids == _PREFIX
        else:  # no target before it: the target of a position is the token behind it
            before = (labels >= 0).to(torch.int64)
            before = before.cumsum(dim=1) - before
            inside = before == _at_start(before, first)
        return torch.where(inside & ~padding, 0, -1)
    inside = (types == 1) | (types == 2)
    if adapter.bidirectional_tokens:
        further = torch.tensor(adapter.bidirectional_tokens, device=input_ids.device)
        inside = inside | torch.isin(input_ids, further) & ~padding
    if adapter.bidirectional == "sample_images":
        return torch.where(inside, 0, -1)
    starts = inside.clone()
    starts[:, 1:] &= ~inside[:, :-1] | first[:, 1:]
    return torch.where(inside, starts.cumsum(dim=1) - 1, -1)


def check_cp(adapter: ModelAdapter, cp_size: int) -> None:
    """Refuse context parallelism for a family with blocks: a block may lie on several ranks, and kernels take no blocks.

    Raises:
        UnsafeModelError: such a family, and more than one rank.
    """
    if cp_size > 1 and adapter.bidirectional is not None:
        raise UnsafeModelError(
            f"{adapter.name} has tokens that see each other both ways (bidirectional={adapter.bidirectional!r}), and context "
            f"parallelism computes causal attention alone: cp_size must be 1, got {cp_size}"
        )


def _at_start(counts: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return, at each token, what a count that never falls is at the first token of its segment."""
    return torch.where(first, counts, 0).cummax(dim=1).values


def block_masks(
    blocks: torch.Tensor, lengths: Sequence[int], window: int | None, layers: BlockLayers
) -> Sequence[torch.Tensor | None]:
    """Return who sees whom in each segment, bool [L, L]; None for a segment without a block, which is causal.

    The masks are kept on the tensor, so that the layers of a pass share them.

    Args:
        blocks: integers [1, T], see `varlen_attention`.
        lengths: the segments' lengths, T together.
        window: how many tokens back a token sees, itself included; None for all.
        layers: how blocks and windows meet, see `varlen_attention`.
    """
    known: dict[object, Sequence[torch.Tensor | None]] = getattr(blocks, _MASKS, None) or {}
    setattr(blocks, _MASKS, known)
    key = (tuple(lengths), window, layers)
    if key not in known:
        parts = torch.split(blocks[0], list(lengths))
        # A token alone in its block sees what causal order lets it see.
        shared = [bool(one) for one in torch.stack([(part >= 0).sum() > 1 for part in parts]).tolist()]
        if layers == "sliding" and window is None:
            shared = [False] * len(parts)
        known[key] = [_mask(part, window, layers) if has else None for part, has in zip(parts, shared, strict=True)]
    return known[key]


def _mask(blocks: torch.Tensor, window: int | None, layers: BlockLayers) -> torch.Tensor:
    places = torch.arange(len(blocks), device=blocks.device)
    behind = places[:, None] - places
    seen = behind >= 0
    same = (blocks[:, None] == blocks) & (blocks >= 0)
    if window is None:
        return seen | same
    near = behind < window
    return (seen & near) | same if layers == "beyond" else (seen | same) & near
