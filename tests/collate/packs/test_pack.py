"""THD rows: boundaries, padding, targets and media, against values written by hand and a slow packer."""

import numpy as np
import pytest
import torch

from evenpack.collate import Boundaries, pack_alignment, pack_samples, prepare_sample
from evenpack.core import Field, FieldShapeError, OversizeSampleError
from evenpack.models import adapter_for, dummy_sample, dummy_text

TEXT, QWEN = adapter_for("text"), adapter_for("qwen2_5_vl")


def texts(*lengths):
    return [{"input_ids": list(range(1, n + 1)), "sample_id": i} for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("case", "lengths", "settings", "real", "padded"),
    [
        ("T1: the tail is one segment", [3, 2], {"pad_to": 8}, [0, 3, 5, 5], [0, 3, 5, 8]),
        ("T3: padding between segments", [3, 5], {"align": 4}, [0, 3, 8], [0, 4, 12]),
        ("T4: aligned already", [4, 8], {"align": 4}, [0, 4, 12], [0, 4, 12]),
        ("T5: a single token", [1], {"align": 8}, [0, 1], [0, 8]),
        ("T8: length 7, cp 2", [7], {"align": 4}, [0, 7], [0, 8]),
        ("T10: no padding", [3, 2], {}, [0, 3, 5], [0, 3, 5]),
        ("tail and padding", [3, 5], {"align": 4, "pack_align": 16}, [0, 3, 8, 8], [0, 4, 12, 16]),
        ("static: repeated boundaries", [3, 2], {"pad_to": 8, "max_segments": 5}, [0, 3, 5, 5, 5, 5], [0, 3, 5, 8, 8, 8]),
    ],
)
def test_boundaries(case, lengths, settings, real, padded):
    batch = pack_samples(texts(*lengths), adapter=TEXT, **settings)
    assert batch.cu_seqlens_q.tolist() == batch.cu_seqlens_kv.tolist() == real, case
    assert batch.cu_seqlens_q_padded.tolist() == batch.cu_seqlens_kv_padded.tolist() == padded, case
    assert batch.cu_seqlens_q.dtype == batch.cu_seqlens_q_padded.dtype == torch.int32
    assert batch.max_seqlen_q == batch.max_seqlen_kv == max(np.diff(padded))
    assert batch.total_tokens == padded[-1] == batch.input_ids.shape[1]
    assert (batch.cu_seqlens_q_padded is batch.cu_seqlens_q) == (real == padded), "identity says whether anything is padded"
    assert (batch.cu_seqlens_kv_padded is batch.cu_seqlens_kv) == (real == padded)
    for other in (batch.to("cpu"), batch.to("meta")):
        assert (other.cu_seqlens_q_padded is other.cu_seqlens_q) == (real == padded)
    assert batch.num_segments == len([n for n in np.diff(padded) if n]) == len(batch.sample_ids)


def test_t2_boundaries_come_from_lengths_not_from_positions(make):
    """t positions 0 0 0 0 2 3 and 0 1 2: a reader of restarts would find six segments."""
    image = make.raw("qwen2_5_vl", [("image", 1, 2, 4), 1])
    image = {name: value[1:] if name in ("input_ids", "mm_token_type_ids") else value for name, value in image.items()}
    batch = pack_samples([image, {"input_ids": [5, 6, 7]}], adapter=QWEN)
    assert batch.position_ids[0, 0].tolist() == [0, 0, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 4, 7]


def test_t7_t8_padding_is_marked_everywhere():
    batch = pack_samples(texts(7, 2), adapter=TEXT, align=4, pack_align=16)
    pad = [False] * 7 + [True] + [False] * 2 + [True] * 2 + [True] * 4
    assert batch.padding_mask[0].tolist() == pad
    assert batch.labels[0][torch.tensor(pad)].tolist() == [-100] * 7
    assert batch.loss_mask[0][torch.tensor(pad)].tolist() == [0.0] * 7
    assert batch.position_ids[0].tolist() == [*range(8), 0, 1, 2, 3, 0, 1, 2, 3], "padding goes on, the tail starts at 0"
    assert batch.segment_ids[0].tolist() == batch.seq_idx[0].tolist() == [0] * 8 + [1] * 4 + [2] * 4
    assert batch.cu_seqlens_q_padded[-1] == batch.total_tokens, "no slot lies beyond the last boundary"
    assert batch.sample_ids == [0, 1, None]


def test_t9_targets_end_with_their_segment():
    batch = pack_samples([{"input_ids": [1, 2, 3]}, {"input_ids": [7, 8]}], adapter=TEXT)
    assert batch.labels.tolist() == batch.shift_labels.tolist() == [[2, 3, -100, 8, -100]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0]]
    assert batch.loss_tokens == 3


@pytest.mark.parametrize(("sequence_parallel", "segment", "row"), [(False, 104, 6656), (True, 128, 8192)])
def test_t13_blocks_of_128_pad_the_pack_once(sequence_parallel, segment, row):
    """cp 4, tp 8, FP8 blocks of 128, 64 segments of 100 tokens: never each segment to 4096."""
    align, pack_align = pack_alignment(cp_size=4, tp_size=8, sequence_parallel=sequence_parallel, fp8="blockwise")
    assert (align, pack_align) == ((64, 4096) if sequence_parallel else (8, 512))
    batch = pack_samples(texts(*[100] * 64), adapter=TEXT, align=align, pack_align=pack_align)
    assert batch.bounds.padded[:64].tolist() == [segment] * 64
    assert batch.total_tokens == row
    assert batch.num_segments == 64 + (64 * segment != row)


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ({}, (1, 1)),
        ({"tp_size": 8}, (1, 1)),
        ({"tp_size": 8, "sequence_parallel": True}, (8, 8)),
        ({"cp_size": 3}, (6, 6)),
        ({"fp8": "tensorwise"}, (1, 16)),
        ({"cp_size": 2, "fp8": "mxfp8"}, (4, 64)),
    ],
)
def test_alignment_of_a_layout(layout, want):
    align, pack_align = pack_alignment(**layout)
    assert (align, pack_align) == want
    assert pack_align % align == 0


@pytest.mark.parametrize(("layout", "text"), [({"cp_size": 0}, "cp_size=0"), ({"fp8": "int8"}, "'int8'")])
def test_an_impossible_layout_is_named(layout, text):
    with pytest.raises(ValueError, match=text):
        pack_alignment(**layout)


@pytest.mark.parametrize("family", ["text", "qwen2_5_vl", "qwen3_vl"])
def test_every_row_field_equals_the_slow_packer(make, family):
    adapter = adapter_for(family)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        samples = make.random_samples(family, rng)
        align = int(rng.choice([1, 2, 4, 8, 12]))
        pack_align = align * int(rng.choice([1, 3, 8]))
        batch = pack_samples(samples, adapter=adapter, align=align, pack_align=pack_align)
        want = make.naive_rows(samples, adapter, align, pack_align)
        for name in ("input_ids", "labels", "loss_mask", "padding_mask", "segment_ids"):
            assert getattr(batch, name)[0].tolist() == want[name], name
        assert batch.mm_token_type_ids[0].tolist() == want["types"]
        assert batch.media_token_validity_mask[0].tolist() == [kind != 0 for kind in want["types"]]
        assert batch.cu_seqlens_q.tolist() == want["real"]
        assert batch.cu_seqlens_q_padded.tolist() == want["padded"]
        assert batch.loss_tokens == sum(weight != 0 for weight in want["loss_mask"])
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
            pieces = [sample.values[name] for sample in samples if name in sample.values]
            assert torch.equal(getattr(batch, name), torch.cat(pieces)) if pieces else getattr(batch, name, None) is None
        # one anchor per feature, whatever the padding
        assert int(batch.media_token_validity_mask.sum()) == sum(
            int(batch.media[name].prod(1).sum()) // 4 for name in ("image_grid_thw", "video_grid_thw") if name in batch.media
        )


def test_t11_loss_and_gradient_do_not_depend_on_the_shard():
    """One valid target, on one of two context-parallel ranks: summed gradients equal those without sharding."""
    raw = {"input_ids": list(range(8)), "labels": [-100] * 7 + [7]}
    batch = pack_samples([raw], adapter=TEXT, align=4)
    gradients = []
    for parts in ([batch], [batch.shard(0, 2), batch.shard(1, 2)]):
        torch.manual_seed(0)
        table = torch.nn.Embedding(8, 8, dtype=torch.float64)
        for part in parts:
            losses = torch.nn.functional.cross_entropy(table(part.input_ids[0]), part.labels[0], reduction="none")
            (losses * part.loss_mask[0] / batch.loss_tokens).sum().backward()
        gradients.append(table.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].abs().sum() > 0


def test_d6_every_image_follows_its_sample(make):
    """A sample without images, then one with two: image i is not sample i's."""
    none, two, one = make.raw("qwen2_5_vl", [3]), [("image", 1, 2, 2), 1, ("image", 1, 4, 4)], [("image", 1, 2, 4), 2]
    samples = [none, make.raw("qwen2_5_vl", two), make.raw("qwen2_5_vl", one)]
    batch = pack_samples(samples, adapter=QWEN, align=4)
    assert batch.image_grid_thw.tolist() == [[1, 2, 2], [1, 4, 4], [1, 2, 4]]
    anchors = batch.unpack(batch.media_token_validity_mask)
    assert [int(mask.sum()) for mask in anchors] == [0, 1 + 4, 2]
    assert torch.equal(batch.pixel_values, torch.cat([samples[1]["pixel_values"], samples[2]["pixel_values"]]))


def test_further_fields_travel_with_their_samples():
    """Per-token, per-axis, per-sample and text fields; an absent optional one takes its default."""
    fields = TEXT.fields.extended(
        [
            Field(name="advantages", kind="token", dtype="float32", default=0.5, pad=-1),
            Field(name="routes", kind="token", dtype="int64", shape=(2,), axis=1, default=0),
            Field(name="reward", kind="sample", dtype="float32", default=2.0),
            Field(name="caption", kind="sample", dtype="text"),
        ]
    )
    adapter = type(TEXT)(name="text", fields=fields)
    first = {"input_ids": [1, 2], "advantages": [1.0, 2.0], "routes": [[1, 2], [3, 4]], "caption": "a", "sample_id": "x"}
    batch = pack_samples([first, {"input_ids": [3], "reward": 1.0}, dummy_text(TEXT)], adapter=adapter, align=4, num_dummies=1)
    assert batch.advantages.tolist() == [[1, 2, -1, -1, 0.5, -1, -1, -1, -1, -1, -1, -1]]
    assert batch.routes.shape == (2, 1, 12)
    assert batch.routes[:, 0, :4].tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    assert batch.caption == ["a", None, None]
    assert [None if value is None else value.item() for value in batch.reward] == [2.0, 1.0, None]
    assert batch.sample_ids == ["x", None, None]
    assert batch.shard(0, 2).routes.shape == (2, 1, 6)
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = batch.no_such_field


def test_dummies_have_no_id_no_loss_and_the_dtype_of_the_others(make):
    image = make.raw("qwen2_5_vl", [2, ("image", 1, 4, 4), 2], sample_id=7)
    image["pixel_values"] = image["pixel_values"].to(torch.bfloat16)
    batch = pack_samples([image, dummy_sample("image", QWEN)], adapter=QWEN, num_dummies=1)
    assert batch.sample_ids == [7, None]
    assert (batch.num_samples, batch.pixel_values.dtype, len(batch.pixel_values)) == (1, torch.bfloat16, 16 + 4)
    assert batch.loss_tokens == pack_samples([image], adapter=QWEN).loss_tokens
    assert len(batch.unpack(batch.input_ids)) == 1
    named = pack_samples(texts(2, 1), adapter=TEXT, num_dummies=1, align=2)
    assert named.sample_ids == [0, None], "a dummy is nobody's sample, whatever it was made from"
    alone = pack_samples([dummy_text(TEXT)], adapter=TEXT, num_dummies=1, align=8)
    assert (alone.loss_tokens, alone.num_samples) == (0, 0)
    assert alone.padding_mask[0].tolist() == [False] + [True] * 7, "a row of padding alone gives NaN in routers"


def test_weight_scales_multiply_each_sample_alone():
    batch = pack_samples(texts(3, 3), adapter=TEXT, weight_scales=[0.5, 2.0], align=4)
    assert batch.loss_mask.tolist() == [[0.5, 0.5, 0, 0, 2, 2, 0, 0]]


def test_megatron_samples_are_shifted_already():
    """The last target of an already shifted sample is kept, its padding is cut."""
    raw = {
        "tokens": torch.tensor([5, 6, 7, 0]),
        "labels": torch.tensor([6, 7, 8, 0]),
        "loss_mask": torch.tensor([0.0, 1.0, 1.0, 0.0]),
        "position_ids": torch.arange(4),
        "original_seq_len": torch.tensor([3], dtype=torch.int32),
        "padded_seq_len": torch.tensor([4], dtype=torch.int32),
    }
    batch = pack_samples([raw, raw], adapter=TEXT)
    assert batch.labels.tolist() == [[6, 7, 8, 6, 7, 8]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 1, 1]]


def test_mtp_targets_stay_in_their_segment():
    batch = pack_samples(texts(4, 2), adapter=TEXT, align=4)
    assert batch.labels.tolist() == [[2, 3, 4, -100, 2, -100, -100, -100]]
    labels, weights = batch.mtp_targets()
    assert labels.tolist() == [[3, 4, -100, -100, -100, -100, -100, -100]]
    assert weights.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.mtp_targets(2)[0].tolist() == [[4] + [-100] * 7]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"align": 4, "pack_align": 6}, ValueError, "multiple of align.* 6 and 4"),
        ({"align": 0}, ValueError, "at least 1"),
        ({"align": 4, "pad_to": 10}, ValueError, "multiple of 4, got 10"),
        ({"pad_to": 4}, OversizeSampleError, "5 tokens need 5 slots.* pad_to=4"),
        ({"pad_to": 8, "max_segments": 2}, ValueError, "3 segments .* max_segments=2"),
        ({"max_seqlen": 2}, ValueError, "max_seqlen=2 is less than the longest segment, 3"),
        ({"num_dummies": 3}, ValueError, "got 2, num_dummies=3"),
        ({"weight_scales": [1.0]}, ValueError, "1 weight_scales for 2 samples"),
    ],
)
def test_wrong_settings_are_named(settings, error, text):
    with pytest.raises(error, match=text):
        pack_samples(texts(3, 2), adapter=TEXT, **settings)


def test_an_empty_pack_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        pack_samples([], adapter=TEXT)


def test_samples_that_cannot_lie_in_one_tensor_are_named(make):
    half = make.raw("qwen2_5_vl", [("image", 1, 2, 2)])
    half["pixel_values"] = half["pixel_values"].half()
    with pytest.raises(FieldShapeError, match=r"pixel_values.*float32.*float16"):
        pack_samples([make.raw("qwen2_5_vl", [("image", 1, 2, 2)]), half], adapter=QWEN)


def test_a_bad_raw_sample_is_named_by_place_and_id():
    with pytest.raises(FieldShapeError, match=r"sample 1 \('bad'\): .*'labels' has 1 values, but 'input_ids' has 2"):
        pack_samples([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1], "sample_id": "bad"}], adapter=TEXT)


def test_m5_a_field_of_another_length_cannot_leave_the_packer(monkeypatch):
    from evenpack.collate.packs import pack

    monkeypatch.setattr(pack, "pack_positions", lambda layouts, cu, adapter: np.arange(cu[-1] + 1)[None])
    with pytest.raises(AssertionError, match="position_ids"):
        pack_samples(texts(3, 2), adapter=TEXT)


def test_static_shapes_do_not_depend_on_the_samples():
    settings = {"pad_to": 32, "max_segments": 6, "max_seqlen": 32}
    shapes = set()
    for lengths in ([3, 2], [7, 7, 7, 7], [32]):
        batch = pack_samples(texts(*lengths), adapter=TEXT, **settings)
        shapes.add((batch.cu_seqlens_q.shape, batch.max_seqlen_q, *[t.shape for t, _ in batch.token_tensors().values()]))
    assert len(shapes) == 1


def test_boundaries_alone_count_what_a_pack_would():
    bounds = Boundaries([3, 5], align=4, pack_align=16)
    assert (bounds.total, bounds.num_segments, bounds.num_samples, bounds.has_padding) == (16, 3, 2, True)


def test_a_prepared_sample_packs_like_its_raw_one(make):
    raw = make.random_raw("qwen2_5_vl", np.random.default_rng(3))
    ready = prepare_sample(raw, adapter=QWEN)
    for name, (tensor, _) in pack_samples([raw], adapter=QWEN).token_tensors().items():
        assert torch.equal(tensor, pack_samples([ready], adapter=QWEN).token_tensors()[name][0])


def test_pinned_packs_hold_the_same(make, monkeypatch):
    """Without an accelerator nothing can be pinned, so the request is noted and dropped."""
    pinned, empty = [], torch.empty

    def noted(*args, pin_memory=False, **kwargs):
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    samples = make.random_samples("qwen2_5_vl", np.random.default_rng(2), 4)
    plain = pack_samples(samples, adapter=QWEN, align=4)
    monkeypatch.setattr(torch, "empty", noted)
    again = pack_samples(samples, adapter=QWEN, align=4, pin_memory=True)
    assert all(pinned) and len(pinned) >= len(plain.token_tensors()) + len(plain.media)
    for name, (tensor, _) in plain.token_tensors().items():
        assert torch.equal(tensor, again.token_tensors()[name][0]), name
    for name, tensor in plain.media.items():
        assert torch.equal(tensor, again.media[name]), name
    assert (again.cu_seqlens_q_padded is again.cu_seqlens_q) == (plain.cu_seqlens_q_padded is plain.cu_seqlens_q)
