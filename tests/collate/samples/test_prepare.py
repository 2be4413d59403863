"""Raw samples: what is accepted, what is filled in, and the named error of everything else."""

import numpy as np
import pytest
import torch

from evenpack.collate import prepare_sample
from evenpack.core import (
    AmbiguousMediaError,
    Field,
    FieldShapeError,
    MediaMismatchError,
    MissingFieldError,
    SampleError,
    UndeclaredFieldError,
)
from evenpack.models import adapter_for

TEXT, QWEN = adapter_for("text"), adapter_for("qwen2_5_vl")
IMAGE, START, END, PAD = 151655, 151652, 151653, 151643
ONE_IMAGE = {
    "input_ids": [5, START, *[IMAGE] * 4, END, 6],
    "image_grid_thw": [[1, 4, 4]],
    "pixel_values": torch.zeros(16, 1176),
}
NAN, INF = float("nan"), float("inf")


def bad_pixels() -> torch.Tensor:
    pixels = torch.zeros(16, 1176)
    pixels[3, 7], pixels[9, 0] = NAN, INF
    return pixels


@pytest.mark.parametrize(
    ("raw", "error", "text"),
    [
        (5, FieldShapeError, "must be a mapping .* got int"),
        ({}, MissingFieldError, "required field 'input_ids' is missing"),
        ({"input_ids": None}, MissingFieldError, "'input_ids' is missing"),
        ({"input_ids": [1], "inputs": [1]}, UndeclaredFieldError, "undeclared field 'inputs'; declared are input_ids, labels"),
        ({"input_ids": []}, FieldShapeError, "empty: 'input_ids' has 0 tokens, at least 1"),
        ({"input_ids": [[1, 2]]}, FieldShapeError, r"must have shape \[\*\], got \[1, 2\]: a batch, .*batch_size=None"),
        ({"input_ids": [[1], [2, 3]]}, FieldShapeError, "no regular list"),
        ({"input_ids": "abc"}, FieldShapeError, "a tensor, an array or a list, got str"),
        ({"input_ids": [1.0]}, FieldShapeError, "must be int64, got a list of float64"),
        ({"input_ids": [True, False]}, FieldShapeError, "must be int64, got a list of bool"),
        ({"input_ids": torch.tensor([1], dtype=torch.int32)}, FieldShapeError, r"must be int64, got int32: .*\.long\(\)"),
        ({"input_ids": np.array([1], dtype=np.int32)}, FieldShapeError, r"int64, got int32: .*astype\(numpy\.int64\)"),
        ({"input_ids": np.array([1], dtype=object)}, FieldShapeError, "no tensor dtype"),
        ({"input_ids": torch.tensor([[0, 1]]).to_sparse()[0]}, FieldShapeError, "must be a dense tensor"),
        ({"input_ids": [2**70]}, FieldShapeError, "must hold numbers"),
        ({"input_ids": [2**63]}, FieldShapeError, "must hold numbers, got uint64"),
        ({"input_ids": [1, -7]}, FieldShapeError, r"input_ids\[1\] is -7, ids must be at least 0"),
        ({"input_ids": [1, 2], "labels": [1]}, FieldShapeError, "'labels' has 1 values, but 'input_ids' has 2"),
        ({"input_ids": [1, 2], "loss_weights": [1.0, NAN]}, FieldShapeError, "'loss_weights' has 1 of 2 values .* not finite"),
        ({"input_ids": [1], "loss_weights": [1e39]}, FieldShapeError, "1e\\+39, which float32 cannot represent"),
        ({"input_ids": [1], "loss_weights": [2**24 + 1]}, FieldShapeError, "16777217, which float32 cannot represent"),
        ({"input_ids": [1], "sample_id": 1.5}, FieldShapeError, "a string or an integer, got float 1.5"),
        ({"input_ids": [1], "sample_id": True}, FieldShapeError, "got bool True"),
        ({"input_ids": [1], "sample_id": 2**64}, FieldShapeError, "2\\^64 - 1, got 18446744073709551616"),
        ({"input_ids": [1], "sample_id": -(2**63) - 1}, FieldShapeError, "got -9223372036854775809"),
        ({"input_ids": [1], "sample_id": "\ud800"}, FieldShapeError, "no text that UTF-8 can hold"),
        (ONE_IMAGE | {"pixel_values": bad_pixels()}, FieldShapeError, "'pixel_values' has 2 of 18816 values that are not"),
        (ONE_IMAGE | {"pixel_values": torch.zeros(16, 1175)}, FieldShapeError, r"shape \[\*, 1176\], got \[16, 1175\]"),
        (ONE_IMAGE | {"pixel_values": torch.zeros(15, 1176)}, FieldShapeError, "has 15 rows, .* 1 image items have 16"),
        (ONE_IMAGE | {"pixel_values": torch.zeros(16, 1176).int()}, FieldShapeError, "must be float, got int32"),
        (ONE_IMAGE | {"pixel_values": None}, FieldShapeError, "'pixel_values' has 0 rows, .* have 16"),
        ({"input_ids": [1, 2], "pixel_values": torch.zeros(16, 1176)}, FieldShapeError, "has 16 rows, .* 0 image items have 0"),
        ({"input_ids": [1, 2], "labels": [-1, 5]}, FieldShapeError, r"labels\[0\] is -1, labels must be at least 0, or -100"),
        ({"input_ids": [1, 2, 3], "labels": [-100, 5, -101]}, FieldShapeError, r"labels\[2\] is -101, labels must"),
        # M4: features without placeholders, placeholders without features, grids left over
        (ONE_IMAGE | {"input_ids": [5, 6]}, MediaMismatchError, "0 image tokens .* 4 features"),
        (ONE_IMAGE | {"image_grid_thw": [[1, 4, 4]] * 2}, MediaMismatchError, "4 image tokens .* 8 features"),
        (ONE_IMAGE | {"mm_token_type_ids": [0, 0, 1, 1, 1, 0, 0, 0]}, MediaMismatchError, "3 image tokens .* 4 features"),
        (ONE_IMAGE | {"mm_token_type_ids": [1, 0, 1, 1, 1, 1, 0, 0]}, MediaMismatchError, "token 0 is typed as image"),
        # M3: spelled tokens that no one can tell from the image's
        (ONE_IMAGE | {"input_ids": [IMAGE] * 4 + [5, START, *[IMAGE] * 4]}, AmbiguousMediaError, "exactly one way"),
        # P4: a padded row
        (
            {"input_ids": [1, 2, 3, *[PAD] * 13]},
            FieldShapeError,
            "13 of 16 tokens are the padding token 151643.*attention_mask",
        ),
        ({"input_ids": [PAD, PAD, 1, 2]}, FieldShapeError, "padded row needs 'attention_mask'"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, FieldShapeError, "marks 2 tokens between 0 and 3"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, FieldShapeError, r"shape \[2\], but input_ids has 3"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 2, 0]}, FieldShapeError, r"zeros and ones, got \[0, 1, 2\]"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, FieldShapeError, "empty: its attention_mask marks 0 of 2"),
    ],
)
def test_bad_input_is_a_named_error(raw, error, text):
    with pytest.raises(error, match=f"rank 1, sample 'x': .*{text}") as caught:
        prepare_sample(raw, adapter=QWEN, where="rank 1, sample 'x'")
    assert isinstance(caught.value, SampleError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("labels", None, "needs 'labels'"),
        ("original_seq_len", None, "needs 'original_seq_len'"),
        ("original_seq_len", 5, "original_seq_len 5, padded_seq_len 4, but 4 tokens"),
        ("original_seq_len", [1, 2], r"must be one integer, got torch.int64 of shape \[2\]"),
        ("padded_seq_len", 8, "original_seq_len 3, padded_seq_len 8, but 4 tokens"),
        ("position_ids", [0, 1, 0, 1], r"must count 0\.\.2"),
        ("loss_mask", [1, 1], "'loss_weights' has 2 values, but 'input_ids' has 4"),
        ("cu_seqlens", [0, 4], "undeclared field 'cu_seqlens'"),
    ],
)
def test_bad_megatron_samples_are_named(key, value, text):
    raw = {"tokens": [5, 6, 7, 0], "labels": [6, 7, 8, 0], "original_seq_len": 3, "padded_seq_len": 4, key: value}
    with pytest.raises(SampleError, match=text):
        prepare_sample(raw, adapter=TEXT)


def test_megatron_samples_are_cut_and_keep_their_last_target():
    raw = {"tokens": [5, 6, 7, 0], "labels": [6, 7, 8, 0], "loss_mask": [0.0, 1.0, 0.5, 0.0], "original_seq_len": [3]}
    sample = prepare_sample(raw, adapter=TEXT)
    assert sample.shifted
    assert sample.tensor("labels").tolist() == [6, 7, 8]
    assert sample.tensor("loss_weights").tolist() == [0, 1, 0.5]


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [0, 1, 1, 1]])
@pytest.mark.parametrize("convert", [list, torch.tensor, np.array, lambda mask: torch.tensor(mask).bool()])
def test_padded_rows_are_trimmed_by_their_mask(mask, convert):
    """P4: every token field of the row is cut, whichever side the padding is on."""
    real = torch.tensor(mask).bool()
    row = torch.where(real, torch.arange(4) + 10, PAD)
    raw = {"input_ids": row, "labels": row.clone(), "loss_weights": row.float(), "attention_mask": convert(mask)}
    sample = prepare_sample(raw, adapter=QWEN)
    for name in ("input_ids", "labels", "loss_weights"):
        assert sample.tensor(name).tolist() == row[real].tolist()
        assert sample.tensor(name).is_contiguous()


@pytest.mark.parametrize(
    "raw",
    [
        {"input_ids": [1, PAD, PAD], "attention_mask": [1, 1, 1]},  # said to be real
        {"input_ids": [1, PAD, PAD], "labels": [1, 2, PAD]},  # learned, so real
        {"input_ids": [1, PAD, 2, PAD]},  # L3: the end of a turn, not of the sample
    ],
)
def test_real_tokens_that_look_like_padding_are_kept(raw):
    assert prepare_sample(raw, adapter=QWEN).num_tokens == len(raw["input_ids"])


def test_defaults():
    sample = prepare_sample(ONE_IMAGE, adapter=QWEN)
    assert sample.tensor("labels").tolist() == [5, START, -100, -100, -100, -100, END, 6]
    assert sample.tensor("loss_weights").tolist() == [1.0] * 8
    assert sample.sample_id is None
    assert "mm_token_type_ids" not in sample.values
    assert sample.layout.type_ids().tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_m2_spelled_tokens_are_counted_and_not_learned_by_default():
    raw = ONE_IMAGE | {"input_ids": [IMAGE, 5, *ONE_IMAGE["input_ids"]], "mm_token_type_ids": [0] * 4 + [1] * 4 + [0] * 2}
    sample = prepare_sample(raw, adapter=QWEN)
    assert sample.layout.num_spelled == 1
    assert sample.layout.type_ids().tolist() == raw["mm_token_type_ids"]
    assert sample.tensor("labels")[0] == -100


def test_m3_spelled_tokens_are_told_apart_where_only_one_way_fits():
    raw = ONE_IMAGE | {"input_ids": [IMAGE, IMAGE, 5, *ONE_IMAGE["input_ids"]]}
    assert prepare_sample(raw, adapter=QWEN).layout.runs[:, :2].tolist() == [[5, 4]]


@pytest.mark.parametrize(
    ("value", "want"),
    [([0.5, 2], torch.tensor([0.5, 2.0])), (np.array([0.5, 1]), torch.tensor([0.5, 1.0], dtype=torch.float64))],
)
def test_lists_take_the_declared_dtype_and_arrays_keep_theirs(make, value, want):
    """Processors return lists for seconds per grid; a list of Python floats has no dtype of its own."""
    raw = make.raw("qwen2_5_vl", [("video", 1, 2, 2), ("video", 2, 2, 2)]) | {"second_per_grid_ts": value}
    got = prepare_sample(raw, adapter=QWEN).tensor("second_per_grid_ts")
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), [np.uint8(1), np.int16(2)], [torch.tensor(1), torch.tensor(2)], np.arange(1, 3), torch.arange(1, 3)]
)
def test_integers_are_taken_exactly_whatever_holds_them(ids):
    assert prepare_sample({"input_ids": ids}, adapter=TEXT).tensor("input_ids").tolist() == [1, 2]


def test_seconds_per_grid_default_to_one(make):
    raw = make.raw("qwen2_5_vl", [("video", 2, 2, 2), 1])
    del raw["second_per_grid_ts"]
    sample = prepare_sample(raw, adapter=QWEN)
    assert sample.tensor("second_per_grid_ts").tolist() == [1.0]
    assert sample.layout.seconds.tolist() == [1.0]


def test_no_items_are_the_same_as_no_field():
    raw = {"input_ids": [1, 2], "pixel_values": torch.zeros(0, 1176), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    assert set(prepare_sample(raw, adapter=QWEN).values) == {"input_ids", "labels", "loss_weights"}


def test_arrays_that_torch_cannot_share_are_copied():
    backwards = np.arange(4)[::-1]
    frozen = np.arange(4)
    frozen.setflags(write=False)
    assert prepare_sample({"input_ids": backwards}, adapter=TEXT).tensor("input_ids").tolist() == [3, 2, 1, 0]
    assert prepare_sample({"input_ids": frozen}, adapter=TEXT).tensor("input_ids").tolist() == [0, 1, 2, 3]


def test_large_finite_pixels_whose_sum_overflows_are_accepted():
    assert prepare_sample(ONE_IMAGE | {"pixel_values": torch.full((16, 1176), 3e38)}, adapter=QWEN).num_tokens == 8


class TestUserFields:
    """D4: strings and tensors of any rank travel if they are declared."""

    fields = (
        Field(name="caption", kind="sample", dtype="text", required=True),
        Field(name="boxes", kind="sample", dtype="float32", shape=(None, 4)),
        Field(name="anything", kind="sample", dtype="any", shape=None),
    )
    adapter = type(TEXT)(name="text", fields=TEXT.fields.extended(fields))

    def test_they_are_kept(self):
        raw = {"input_ids": [1], "caption": "a", "boxes": [[0, 1, 2, 3]], "anything": torch.zeros(2, 0, 3, dtype=torch.int16)}
        values = prepare_sample(raw, adapter=self.adapter).values
        assert values["caption"] == "a"
        assert values["boxes"].dtype == torch.float32
        assert values["anything"].shape == (2, 0, 3)

    @pytest.mark.parametrize(
        ("more", "error", "text"),
        [
            ({}, MissingFieldError, "'caption' is missing"),
            ({"caption": 3}, FieldShapeError, "'caption' must be a string, got int 3"),
            ({"caption": "a", "boxes": [[1, 2]]}, FieldShapeError, r"must have shape \[\*, 4\], got \[1, 2\]"),
            ({"caption": "a", "anything": [0.5]}, FieldShapeError, "must be any, got a list of float64"),
        ],
    )
    def test_they_are_checked(self, more, error, text):
        with pytest.raises(error, match=text):
            prepare_sample({"input_ids": [1], **more}, adapter=self.adapter)

    def test_absent_optional_ones_take_their_default(self):
        assert "boxes" not in prepare_sample({"input_ids": [1], "caption": "a"}, adapter=self.adapter).values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_weights": [1.0, -0.5, 1.0]}, r"loss_weights\[1\] is -0.5, weights must be at least 0"),
        ({"loss_weights": [1.0, 0.0, -1e-9]}, r"loss_weights\[2\] is -1e-09"),
    ],
)
def test_weights_below_zero_are_refused(change, message):
    with pytest.raises(FieldShapeError, match=message):
        prepare_sample({"input_ids": [1, 2, 3], **change}, adapter=adapter_for("text"), where="x")


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_time_does_not_run_backwards(seconds):
    adapter = adapter_for("qwen2_5_vl")
    ids = [1, adapter.vision_start, *[adapter.media_tokens["video"]] * 2, adapter.vision_end]
    raw = {
        "input_ids": ids,
        "pixel_values_videos": torch.zeros(8, adapter.patch_dim),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
    }
    prepare_sample({**raw, "second_per_grid_ts": torch.tensor([0.5])}, adapter=adapter)
    with pytest.raises(FieldShapeError, match=rf"second_per_grid_ts\[0\] is {seconds:g}, seconds per grid must be above 0"):
        prepare_sample({**raw, "second_per_grid_ts": torch.tensor([seconds])}, adapter=adapter)
