"""Families that hear: sounds are media items whose rows have different lengths."""

import pytest
import torch

from evenpack.collate import pack_samples, prepare_sample, truncate_sample
from evenpack.core import FieldShapeError, MediaMismatchError
from evenpack.models import adapter_for, dummy_sample

OMNI = adapter_for("qwen2_5_omni")
SOUND, START, END = OMNI.media_tokens["audio"], OMNI.audio_start, OMNI.audio_end


def heard(*frames: int, text: int = 1) -> dict:
    """Return a sample with sounds of so many mel frames, each padded to the longest, and text between them."""
    ids = [7] * text
    for count in frames:
        ids += [START, *[SOUND] * OMNI.token_count("audio", (count, 1, 1)), END, 8]
    mask = torch.arange(max(frames))[None] < torch.tensor(frames)[:, None]
    features = torch.randn(len(frames), 128, max(frames)) * mask[:, None]
    lengths = torch.tensor(frames)
    return {
        "input_ids": ids,
        "input_features": features,
        "feature_attention_mask": mask.long(),
        "audio_feature_lengths": lengths,
    }


def test_sounds_of_different_lengths_are_padded_to_the_longest():
    short, long = heard(8, 5), heard(12)
    batch = pack_samples([short, {"input_ids": [1, 2]}, long], adapter=OMNI, align=4)
    assert batch.input_features.shape == (3, 128, 12)
    assert batch.audio_feature_lengths.tolist() == [8, 5, 12]
    assert batch.feature_attention_mask.sum(1).tolist() == [8, 5, 12]
    assert torch.equal(batch.input_features[:2, :, :8], short["input_features"])
    assert torch.equal(batch.input_features[2:], long["input_features"])
    assert not batch.input_features[:2, :, 8:].any()
    anchors = batch.unpack(batch.media_token_validity_mask)
    counts = [OMNI.token_count("audio", (n, 1, 1)) for n in (8, 5, 12)]
    assert [int(mask.sum()) for mask in anchors] == [counts[0] + counts[1], 0, counts[2]]
    assert set(batch.mm_token_type_ids.unique().tolist()) == {0, 3}


def test_a_dummy_sound_follows_the_others():
    batch = pack_samples([heard(12), dummy_sample("audio", OMNI)], adapter=OMNI, num_dummies=1)
    assert batch.input_features.shape == (2, 128, 12)
    assert len(batch.audio_feature_lengths) == 2


def test_truncation_drops_a_sound_with_its_features():
    sample = prepare_sample(heard(8, 12), adapter=OMNI)
    first = 1 + 1 + OMNI.token_count("audio", (8, 1, 1)) + 1 + 1
    short = truncate_sample(sample, sample.num_tokens - 2, OMNI)
    assert short.num_tokens == first, "the second sound, with its markers, is gone"
    assert short.tensor("audio_feature_lengths").tolist() == [8]
    assert short.tensor("input_features").shape == (1, 128, 12)
    assert len(pack_samples([short], adapter=OMNI).audio_feature_lengths) == 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"input_features": torch.zeros(1, 128, 12)}, FieldShapeError, "audio fields disagree on the number of items"),
        ({"input_ids": [1, 2]}, MediaMismatchError, "0 audio tokens"),
        ({"input_features": torch.zeros(2, 80, 12)}, FieldShapeError, r"must have shape \[\*, 128, \*\], got \[2, 80, 12\]"),
    ],
)
def test_bad_sounds_are_named(change, error, text):
    with pytest.raises(error, match=text):
        prepare_sample(heard(8, 12) | change, adapter=OMNI)
