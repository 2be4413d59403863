"""The varlen attention function against a naive mask, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch

from evenpack.core import UnsafeModelError
from evenpack.models.attention.varlen import varlen_attention

CAUSAL, VISION = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
LENGTHS = [5, 1, 9, 4]


def states(heads=4, kv_heads=2, size=19):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, size, 8), (1, kv_heads, size, 8), (1, kv_heads, size, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def naive(query, key, value, causal=True, window=None, scaling=None):
    """Softmax over a [T, T] mask: the slow way."""
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    index = torch.arange(len(segment))
    behind = index[:, None] - index
    seen = segment[:, None] == segment
    if causal:
        seen = seen & (behind >= 0)
    if window is not None:
        seen = seen & (behind < window)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    "settings", [{}, {"window": 3}, {"window": 100}, {"scaling": 0.3}, {"causal": False}], ids=lambda s: str(s) or "plain"
)
def test_equal_to_a_mask(settings):
    query, key, value = states()
    causal, window = settings.get("causal", True), settings.get("window")
    output, weights = varlen_attention(
        CAUSAL,
        query,
        key,
        value,
        None,
        is_causal=causal,
        scaling=settings.get("scaling"),
        sliding_window=window,
        cu_seq_lens_q=boundaries(),
    )
    assert weights is None and output.is_contiguous()
    torch.testing.assert_close(output, naive(query, key, value, causal, window, settings.get("scaling")), rtol=0, atol=1e-13)


def test_repeated_boundaries_are_empty_segments():
    query, key, value = states()
    plain = varlen_attention(CAUSAL, query, key, value, None, cu_seq_lens_q=boundaries())[0]
    repeated = varlen_attention(CAUSAL, query, key, value, None, cu_seq_lens_q=boundaries([*LENGTHS, 0, 0]))[0]
    assert torch.equal(plain, repeated)


def test_unpacked_rows_keep_working():
    """Without boundaries it is ordinary attention: causal, with a padding mask, or one query behind a cache."""
    query, key, value = states()
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(varlen_attention(CAUSAL, query, key, value, None)[0], whole.transpose(1, 2))
    last = varlen_attention(CAUSAL, query[:, :, -1:], key, value, None)[0]
    torch.testing.assert_close(last, whole.transpose(1, 2)[:, -1:], rtol=0, atol=1e-13)
    mask = torch.ones(1, 1, 19, 19, dtype=torch.bool).tril()
    torch.testing.assert_close(varlen_attention(CAUSAL, query, key, value, mask)[0], whole.transpose(1, 2), rtol=0, atol=1e-13)


def test_a_vision_tower_ignores_boundaries_of_the_text_row():
    query, key, value = states()
    want = varlen_attention(VISION, query, key, value, None)[0]
    assert torch.equal(varlen_attention(VISION, query, key, value, None, cu_seq_lens_q=boundaries([7]))[0], want)


def test_a_pack_takes_no_cache():
    """Keys from before the row (a cache, prefix tuning) belong to no segment."""
    query, key, value = states()
    longer = (torch.cat([key[:, :, :2], key], dim=2), torch.cat([value[:, :, :2], value], dim=2))
    with pytest.raises(UnsafeModelError, match="19 tokens and 21 keys"):
        varlen_attention(CAUSAL, query, *longer, None, cu_seq_lens_q=boundaries())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cu_seq_lens_q": boundaries([3, 4])}, "boundaries of 7 tokens"),
        ({"cu_seq_lens_q": boundaries(), "attention_mask": torch.ones(1, 1, 19, 19)}, "with an attention mask"),
        ({"position_ids": torch.cat([torch.arange(9), torch.arange(10)])[None]}, "cu_seq_lens_q is not given"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_refused(arguments, said):
    query, key, value = states()
    mask = arguments.pop("attention_mask", None)
    with pytest.raises(UnsafeModelError, match=said):
        varlen_attention(CAUSAL, query, key, value, mask, **arguments)
