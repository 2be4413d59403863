"""Media in their places: several of a kind, kinds in turn, and inputs that lie about them."""

import pytest
import torch

from evenpack.collate import pack_samples, prepare_sample
from evenpack.core import FieldShapeError, MediaMismatchError
from evenpack.models import adapter_for, prepare_model

from ...models import tiny
from .test_audio import OMNI, heard

QWEN = adapter_for("qwen2_5_vl")
IMAGE, VIDEO, START, END = QWEN.media_tokens["image"], QWEN.media_tokens["video"], QWEN.vision_start, QWEN.vision_end


def bracketed(token, count):
    return [START, *[token] * count, END]


def patches(count, value=0.0):
    return torch.full((count, QWEN.patch_dim), value)


def videos(*frames):
    """Return a sample with videos of so many frames, 4 x 4 patches each."""
    ids = [5, *(token for count in frames for token in bracketed(VIDEO, count // 2 * 4)), 6]
    grids = torch.tensor([[count // 2, 4, 4] for count in frames])
    return {"input_ids": ids, "video_grid_thw": grids, "pixel_values_videos": patches(int(grids.prod(1).sum()))}


def test_videos_of_different_lengths_in_one_sample():
    sample = prepare_sample(videos(4, 10, 2), adapter=QWEN)
    assert sample.layout.runs[:, :3].tolist() == [[2, 8, 2], [12, 20, 2], [34, 4, 2]]


def test_a_frame_that_is_missing_against_its_grid():
    raw = videos(4, 10, 2)
    with pytest.raises(FieldShapeError, match="'pixel_values_videos' has 112 rows, but the grids of 3 video items have 128"):
        prepare_sample({**raw, "pixel_values_videos": raw["pixel_values_videos"][16:]}, adapter=QWEN)


def test_images_and_videos_in_turn_in_one_padded_sample():
    ids = [5, *(bracketed(IMAGE, 4) + bracketed(VIDEO, 8)) * 2, 6, 7]
    raw = {
        "input_ids": ids,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "pixel_values": torch.cat([patches(16, 0.0), patches(16, 1.0)]),
        "video_grid_thw": torch.tensor([[2, 4, 4]] * 2),
        "pixel_values_videos": torch.cat([patches(32, 2.0), patches(32, 3.0)]),
    }
    pack = pack_samples([raw], adapter=QWEN, align=4)
    turn = [0, 1, 1, 1, 1, 0, 0, *[2] * 8, 0]
    assert pack.mm_token_type_ids[0].tolist() == [0, *turn, *turn, 0, 0, 0]
    assert pack.pixel_values[:, 0].tolist() == [0.0] * 16 + [1.0] * 16
    assert pack.pixel_values_videos[:, 0].tolist() == [2.0] * 32 + [3.0] * 32


def test_types_that_are_padded_on_the_other_side_than_ids():
    ids, types = [5, *bracketed(IMAGE, 4), 6], [0, 0, 1, 1, 1, 1, 0, 0]
    raw = {
        "input_ids": [*ids, *[QWEN.pad_token_id] * 2],
        "attention_mask": [1] * 8 + [0] * 2,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values": patches(16),
    }
    prepare_sample({**raw, "mm_token_type_ids": [*types, 0, 0]}, adapter=QWEN)
    with pytest.raises(MediaMismatchError, match=rf"token 6 is typed as image but its id is {END}, not {IMAGE}"):
        prepare_sample({**raw, "mm_token_type_ids": [0, 0, *types]}, adapter=QWEN)


def test_audio_lengths_in_samples_instead_of_mel_frames():
    raw = heard(12)
    with pytest.raises(MediaMismatchError, match=r"3 audio tokens in 1 runs .* but the grids have 480 features"):
        prepare_sample({**raw, "audio_feature_lengths": raw["audio_feature_lengths"] * 160}, adapter=OMNI)


def test_a_mask_of_ones_is_never_handed_on():
    model = prepare_model(tiny.tiny_model("qwen2_5_vl"))
    pack = pack_samples([{"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1]}], adapter=adapter_for(model.config))
    assert pack.forward_kwargs(model).get("attention_mask") is None


def test_a_reported_length_below_the_longest_segment_says_which_it_is():
    samples = [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5]}]
    text = adapter_for("text")
    with pytest.raises(ValueError, match=r"max_seqlen=2 is less than the longest segment, 3 slots \(segment 1\)"):
        pack_samples(samples, adapter=text, max_seqlen=2)
    with pytest.raises(ValueError, match=r"max_seqlen=3 is less than the longest segment, 11 slots \(the tail of the row\)"):
        pack_samples(samples, adapter=text, pad_to=16, max_seqlen=3)
