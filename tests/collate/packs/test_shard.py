"""Context-parallel shards against an oracle that deals out chunks one slot at a time."""

import importlib.util
import os

import numpy as np
import pytest
import torch

from evenpack.collate import cp_slots, pack_samples
from evenpack.models import adapter_for

PACKS = int(os.environ.get("EVENPACK_RANDOM_PACKS", "300"))
TEXT, QWEN = adapter_for("text"), adapter_for("qwen2_5_vl")


def dealt(padded: list[int], size: int) -> list[list[int]]:
    """Return every rank's slots: cut each segment in 2 * size chunks, deal them 0..size-1, then back size-1..0."""
    held: list[list[int]] = [[] for _ in range(size)]
    start = 0
    for slots in padded:
        width = slots // (2 * size)
        for chunk in range(2 * size):
            owner = chunk if chunk < size else 2 * size - 1 - chunk
            held[owner] += [start + chunk * width + i for i in range(width)]
        start += slots
    return held


@pytest.mark.parametrize(
    ("cu", "size", "slots"),
    [
        ([0, 8, 12], 2, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),  # T6
        ([0, 4, 12], 2, [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),  # T3
        ([0, 8], 4, [[0, 7], [1, 6], [2, 5], [3, 4]]),  # T5
        ([0, 4, 4, 8], 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),  # repeated boundaries
        ([0, 3], 1, [[0, 1, 2]]),
    ],
)
def test_slots_by_hand(cu, size, slots):
    assert [cp_slots(np.array(cu), rank, size).tolist() for rank in range(size)] == slots


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_random_packs_shard_as_dealt_and_reassemble(make, size):
    for seed in range(PACKS // 4):
        rng = np.random.default_rng(1000 * size + seed)
        family = ("text", "qwen2_5_vl")[seed % 2]
        adapter = adapter_for(family)
        samples = make.random_samples(family, rng)
        align = 2 * size * int(rng.choice([1, 1, 2]))
        batch = pack_samples(samples, adapter=adapter, align=align, pack_align=align * int(rng.choice([1, 3])))
        shards = [batch.shard(rank, size, slicing="caller") for rank in range(size)]
        oracle = dealt(batch.bounds.padded.tolist(), size)
        assert [shard.cp_indices.tolist() for shard in shards] == oracle
        for name, (tensor, axis) in batch.token_tensors().items():
            parts = [shard.token_tensors()[name][0] for shard in shards]
            for part, slots in zip(parts, oracle, strict=True):
                assert torch.equal(part, tensor[..., slots]), name
            assert torch.equal(batch.unshard(parts, axis), tensor), name
        assert all(shard.cu_seqlens_q_padded is batch.cu_seqlens_q_padded for shard in shards), "boundaries stay global"
        assert all((s.cp_rank, s.cp_size, s.total_tokens * size) == (r, size, batch.total_tokens) for r, s in enumerate(shards))


def test_t3_boundaries_of_one_rank():
    """Global padded boundaries [0, 4, 12]; each of two ranks holds [0, 2, 6]."""
    batch = pack_samples([{"input_ids": [1] * 3}, {"input_ids": [1] * 5}], adapter=TEXT, align=4)
    for rank in range(2):
        shard = batch.shard(rank, 2)
        assert shard.cu_seqlens_q_padded.tolist() == [0, 4, 12]
        assert np.cumsum(np.bincount(shard.segment_ids[0].numpy())).tolist() == [2, 6]


def test_t5_every_rank_gets_rows_of_a_single_token():
    batch = pack_samples([{"input_ids": [9]}], adapter=TEXT, align=8)
    shards = [batch.shard(rank, 4) for rank in range(4)]
    assert [shard.padding_mask[0].tolist() for shard in shards] == [[False, True], [True, True], [True, True], [True, True]]
    assert [shard.input_ids.shape[1] for shard in shards] == [2] * 4


class TestImageCutByAChunk:
    """T12: 12 anchors between slots 2 and 13 of 16; with cp 2 the chunks are 4 wide."""

    @pytest.fixture
    def batch(self, make):
        raw = make.raw("qwen2_5_vl", [1, ("image", 1, 6, 8), 1], sample_id="a")
        return pack_samples([raw, make.raw("qwen2_5_vl", [("image", 1, 2, 2), 1])], adapter=QWEN, align=4)

    def test_a_model_that_slices_gets_the_whole_row(self, batch):
        assert QWEN.cp_slicing == "model"
        shard = batch.shard(1, 2)
        assert torch.equal(shard.input_ids, batch.input_ids)
        assert torch.equal(shard.position_ids, batch.position_ids)
        assert shard.media_feature_index is None
        assert shard.cp_indices.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 17, 18]
        assert torch.equal(shard.local(shard.labels), batch.labels[:, shard.cp_indices])
        assert torch.equal(batch.local(batch.labels), batch.labels)

    def test_a_caller_learns_which_feature_each_anchor_takes(self, batch):
        shards = [batch.shard(rank, 2, slicing="caller") for rank in range(2)]
        assert shards[0].media_feature_index.tolist() == [[-1, -1, 0, 1, 10, 11, -1, -1, -1, -1]]
        assert shards[1].media_feature_index.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9, 12, -1]]
        assert all(torch.equal(shard.pixel_values, batch.pixel_values) for shard in shards), "media stay whole"

    def test_features_placed_by_the_index_equal_those_of_the_whole_row(self, batch):
        """A mask alone would restart at feature 0 on every rank."""
        features = torch.arange(13.0) + 100
        row = torch.zeros(1, batch.total_tokens).masked_scatter(batch.media_token_validity_mask, features)
        for rank in range(2):
            shard = batch.shard(rank, 2, slicing="caller")
            taken = torch.where(shard.media_feature_index >= 0, features[shard.media_feature_index], 0.0)
            assert torch.equal(taken, shard.local(row))
        shard = batch.shard(1, 2, slicing="caller")
        restarted = torch.zeros(1, 10).masked_scatter(shard.media_token_validity_mask, features)
        assert not torch.equal(restarted, shard.local(row)), "the planted error is seen"


def test_image_and_video_features_are_counted_apart(make):
    raw = make.raw("qwen2_5_vl", [("video", 1, 2, 4), ("image", 1, 2, 4), ("video", 1, 2, 2)])
    shard = pack_samples([raw], adapter=QWEN, align=4).shard(0, 2, slicing="caller")
    assert shard.mm_token_type_ids.tolist() == [[0, 2, 2, 2, 0, 0]]
    assert shard.media_feature_index.tolist() == [[-1, 0, 1, 2, -1, -1]]


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [(2, 2, r"0\.\.1, got 2"), (-1, 2, "got -1"), (0, 3, "segment 0 has 4 slots, no multiple of .* 6.*align=6")],
)
def test_impossible_shards_are_named(rank, size, text):
    batch = pack_samples([{"input_ids": [1, 2, 3]}], adapter=TEXT, align=4)
    with pytest.raises(ValueError, match=text):
        batch.shard(rank, size)


def test_a_shard_is_not_sharded_again_nor_unpacked():
    shard = pack_samples([{"input_ids": [1, 2, 3, 4]}], adapter=TEXT).shard(0, 2)
    with pytest.raises(ValueError, match="already shard 0 of 2"):
        shard.shard(0, 2)
    with pytest.raises(ValueError, match="put the results of shards together first"):
        shard.unpack(shard.input_ids)
    with pytest.raises(ValueError, match="whole pack"):
        shard.mtp_targets()


def test_one_rank_alone_gets_the_pack_itself():
    batch = pack_samples([{"input_ids": [1, 2, 3]}], adapter=TEXT)
    assert batch.shard(0, 1) is batch


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine_torch") is None,
    reason="needs a GPU and Transformer Engine",
)
def test_transformer_engine_takes_the_same_slots():
    for lengths in ([8, 4], [16, 32, 8]):
        batch = pack_samples([{"input_ids": [1] * n} for n in lengths], adapter=TEXT, align=4).to("cuda")
        for rank in range(2):
            assert batch.shard(rank, 2).cp_indices.cpu().tolist() == cp_slots(batch.bounds.cu_padded, rank, 2).tolist()
