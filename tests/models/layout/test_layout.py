"""Anchors and features that do not agree are an error with both numbers, never a mask that hides it."""

import itertools

import numpy as np
import pytest

from evenpack.core import AmbiguousMediaError, MediaMismatchError
from evenpack.models import adapter_for, dummy_sample, sample_layout
from evenpack.models.layout.sample_layout import unique_choice
from evenpack.models.registry import FAMILIES

QWEN, QWEN3, GLM = adapter_for("qwen2_vl"), adapter_for("qwen3_vl"), adapter_for("glm4v")
T, IM, VID, VS, VE = 5, 151655, 151656, 151652, 151653
FOUR, SIX, ONE = (1, 4, 4), (1, 4, 6), (1, 2, 2)


def runs(layout):
    return layout.runs[:, :3].tolist()


@pytest.mark.parametrize(
    ("ids", "grids", "found", "spelled"),
    [
        ([T, VS, IM, IM, IM, IM, VE, T], {"image": [FOUR]}, [[2, 4, 1]], 0),
        ([T, IM, T, VS, IM, IM, IM, IM, VE], {"image": [FOUR]}, [[4, 4, 1]], 1),
        ([IM, IM, T, VS, *[IM] * 4, VE, VS, *[IM] * 6, VE, IM], {"image": [FOUR, SIX]}, [[4, 4, 1], [10, 6, 1]], 3),
        ([T, IM, IM, VID], {}, [], 3),
        ([T, VID, VS, IM, VE], {"image": [ONE]}, [[3, 1, 1]], 1),
        ([VS, VID, VID, VE, VS, IM, VE], {"image": [ONE], "video": [(2, 2, 2)]}, [[1, 2, 2], [5, 1, 1]], 0),
    ],
)
def test_derived_where_there_is_one_way(ids, grids, found, spelled):
    """M2 and M3: a spelled media token anchors nothing, where the lengths of runs and grids leave one choice."""
    layout = sample_layout(ids, grids, adapter=QWEN)
    assert runs(layout) == found and layout.num_spelled == spelled


@pytest.mark.parametrize(
    ("ids", "grids", "error", "said"),
    [
        ([T, VS, IM, IM, IM, IM, VE, IM, IM, IM, IM], [FOUR], AmbiguousMediaError, ["8 image tokens", "4 features"]),
        ([T, IM, IM, IM, IM, IM], [FOUR], AmbiguousMediaError, ["5 image tokens", "4 features"]),
        ([VS, IM, IM, IM, IM, IM, VE], [FOUR, ONE], AmbiguousMediaError, ["5 image tokens in 1 runs", "2 runs"]),
        ([T, T], [FOUR], MediaMismatchError, ["0 image tokens", "4 features"]),
        ([VS, IM, IM, IM, IM, VE], [FOUR, ONE], MediaMismatchError, ["4 image tokens", "5 features"]),
        ([VS, IM, VE], [(1, 3, 2)], MediaMismatchError, ["(1, 3, 2)", "(1, 2, 2)"]),
        ([VS, IM, VE], [(0, 2, 2)], MediaMismatchError, ["(0, 2, 2)"]),
    ],
)
def test_refused_with_both_counts(ids, grids, error, said):
    """M3 and M4."""
    with pytest.raises(error) as caught:
        sample_layout(ids, {"image": grids}, adapter=QWEN, where="rank 1, sample 'x'")
    assert all(text in str(caught.value) for text in ["rank 1, sample 'x'", *said])


@pytest.mark.parametrize(
    ("ids", "grids", "said"),
    [
        ([T, VS, IM, IM, IM, IM, VE, T], {}, ["4 media tokens from position 2 (of 8)", "sample's 0 image items"]),
        ([T, VS, IM, IM], {}, ["2 media tokens from position 2 (of 4)", "the end of the sample"]),
        ([VS, *[IM] * 4, VE, VS, IM, IM, VE], {"image": [FOUR]}, ["2 media tokens from position 7", "sample's 1 image items"]),
        ([VS, VID, VE, VS, IM, VE], {"image": [ONE]}, ["from position 1", "sample's 0 video items", "pixel_values_videos"]),
    ],
)
def test_a_placeholder_between_markers_needs_its_item(ids, grids, said):
    """M4: where its media got lost it was counted as spelled, and trained as text. Types say that text spells it."""
    with pytest.raises(MediaMismatchError) as caught:
        sample_layout(ids, grids, adapter=QWEN, where="rank 1, sample 'x'")
    assert all(text in str(caught.value) for text in ["rank 1, sample 'x'", "mm_token_type_ids", *said]), str(caught.value)
    text = [0] * len(ids)
    if not grids:
        assert sample_layout(ids, {}, None, text, adapter=QWEN).num_spelled == sum(token in (IM, VID) for token in ids)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_refuses_placeholders_without_media(family):
    """The smallest item of each modality, between the family's own markers, with its item and without."""
    adapter = adapter_for(family)
    for modality, grid in adapter.dummy_grids.items():
        ids = dummy_sample(modality, adapter).tensor("input_ids").numpy()
        assert sample_layout(ids, {modality: [grid]}, adapter=adapter).num_spelled == 0
        with pytest.raises(MediaMismatchError, match=f"0 {modality} items is theirs"):
            sample_layout(ids, {}, adapter=adapter)
        bare = ids[np.isin(ids, list(adapter.media_tokens.values()))]
        assert sample_layout([T, *bare, T], {}, adapter=adapter).num_spelled == len(bare)


def test_a_video_with_its_sound_without_media():
    """Omni: frames and sound stand between four markers, in one block."""
    adapter = adapter_for("qwen2_5_omni")
    video, audio = adapter.media_tokens["video"], adapter.media_tokens["audio"]
    ids = [T, VS, adapter.audio_start, video, video, audio, audio, adapter.audio_end, VE]
    with pytest.raises(MediaMismatchError, match="4 media tokens from position 3"):
        sample_layout(ids, {}, adapter=adapter)


@pytest.mark.parametrize(
    ("ids", "types", "grids", "said"),
    [
        ([T, IM, IM, T], [0, 1, 1, 0], {"image": [FOUR]}, ["2 image tokens", "4 features"]),
        ([T, IM, T], [0, 1, 0], {}, ["1 image tokens", "0 features"]),
        ([T, T, T], [0, 1, 0], {"image": [ONE]}, ["token 1", f"id is {T}", str(IM)]),
        ([T, VID, T], [0, 1, 0], {"image": [ONE]}, ["typed as image", str(VID)]),
        ([T, IM, T], [0, 0, 0], {"image": [ONE]}, ["0 image tokens", "1 features"]),
        ([T, IM, IM, T], [0, 1, 1, 0], {"image": [ONE, ONE]}, ["2 image tokens in 1 runs", "2 runs"]),
        ([T, IM, T], [0, 1], {"image": [ONE]}, ["2 mm_token_type_ids", "3 input_ids"]),
        ([T, IM, T], [0, 3, 0], {}, ["[3]", "[0, 1, 2]"]),
        ([T, IM, T], [0, 0, 0], {"audio": [(4, 1, 1)]}, ["1 audio items", "has no audio"]),
    ],
)
def test_explicit_types_must_match_grids_and_ids(ids, types, grids, said):
    with pytest.raises(MediaMismatchError) as caught:
        sample_layout(ids, grids, None, types, adapter=QWEN)
    assert all(text in str(caught.value) for text in said)


def test_explicit_types_tell_spelled_tokens_of_the_same_length():
    """M3 with types: two runs of four tokens, and the types say which is the image."""
    layout = sample_layout([IM] * 4 + [T, VS] + [IM] * 4 + [VE], {"image": [FOUR]}, None, [0] * 6 + [1] * 4 + [0], adapter=QWEN)
    assert runs(layout) == [[6, 4, 1]] and layout.num_spelled == 4


def test_a_video_is_a_run_per_frame_where_timestamps_part_them():
    ids = [T, VS, VID, VID, VE, T, T, VS, VID, VID, VE]
    layout = sample_layout(ids, {"video": [(2, 2, 4)]}, adapter=QWEN3)
    assert layout.runs.tolist() == [[2, 2, 2, 1, 2, 4], [8, 2, 2, 1, 2, 4]]


def test_shared_token_is_told_by_the_video_markers():
    """GLM-4V anchors images and frames with one token; frames stand between video markers."""
    image, start, end, video_start, video_end = 151343, 151339, 151340, 151341, 151342
    ids = [start, image, end, video_start, start, image, end, T, start, image, end, video_end]
    layout = sample_layout(ids, {"image": [ONE], "video": [(2, 2, 2)]}, adapter=GLM)
    assert runs(layout) == [[1, 1, 1], [5, 1, 2], [9, 1, 2]] and layout.num_spelled == 0


@pytest.mark.parametrize(("seconds", "found"), [(None, [0, 1, 1]), ([0.5, 2.0], [0, 0.5, 2.0])])
def test_seconds_follow_their_videos(seconds, found):
    ids = [IM, T, VID, VID, T, VID]
    grids = {"image": [ONE], "video": [(2, 2, 2), (1, 2, 2)]}
    assert sample_layout(ids, grids, seconds, adapter=adapter_for("qwen2_5_vl")).seconds.tolist() == found


def test_seconds_of_another_number_than_videos():
    with pytest.raises(MediaMismatchError, match="1 values of seconds per grid for 2 videos"):
        sample_layout([VID, T, VID], {"video": [ONE, ONE]}, [1.0], adapter=adapter_for("qwen2_5_vl"))


def test_the_only_choice_is_found_like_by_trying_all():
    """Leftmost and rightmost greedy matches agree exactly where one subsequence of the runs equals the grids' lengths."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        have = rng.integers(1, 4, int(rng.integers(0, 7))).tolist()
        want = rng.integers(1, 4, int(rng.integers(1, 4))).tolist()
        ways = [list(c) for c in itertools.combinations(range(len(have)), len(want)) if [have[k] for k in c] == want]
        assert unique_choice(have, want) == (ways[0] if len(ways) == 1 else None)
