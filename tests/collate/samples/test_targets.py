"""Targets and divisors: they add up to the same whatever the packing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from evenpack.collate import pack_samples, prepare_sample, truncate_sample
from evenpack.models import adapter_for

TEXT = adapter_for("text")


def shift_targets(sample):
    """Return what each position of a sample learns, and with what weight: the reference, position by position."""
    labels, weights = sample.tensor("labels").tolist(), sample.tensor("loss_weights").tolist()
    pairs = list(zip(labels, weights, strict=True))
    learned = pairs if sample.shifted else [*pairs[1:], (-100, 0.0)]
    return [label for label, _ in learned], [0.0 if label == -100 else weight for label, weight in learned]


def ready(**raw):
    return prepare_sample(raw, adapter=TEXT)


@pytest.mark.parametrize(
    ("raw", "targets", "weights", "stats"),
    [
        ({"input_ids": [1, 2, 3]}, [2, 3, -100], [1, 1, 0], (2, 2.0)),
        ({"input_ids": [1]}, [-100], [0], (0, 0.0)),
        ({"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, [-100, 3, -100], [0, 1, 0], (1, 1.0)),
        ({"input_ids": [1, 2, 3], "loss_weights": [9.0, 0.5, 0.0]}, [2, 3, -100], [0.5, 0, 0], (1, 0.5)),
        ({"input_ids": [5, 2, 6, 2]}, [2, 6, 2, -100], [1, 1, 1, 0], (3, 3.0)),  # L3: length is not the first eos
        ({"tokens": [1, 2], "labels": [2, 9], "original_seq_len": 2}, [2, 9], [1, 1], (2, 2.0)),
        ({"tokens": [1, 2], "labels": [2, -100], "original_seq_len": 2}, [2, -100], [1, 0], (1, 1.0)),
    ],
)
def test_targets_of_one_sample(raw, targets, weights, stats):
    sample = ready(**raw)
    got_targets, got_weights = shift_targets(sample)
    assert got_targets == targets
    assert got_weights == weights
    assert sample.target_stats() == stats
    batch = pack_samples([sample], adapter=TEXT)
    assert (batch.labels[0].tolist(), batch.loss_mask[0].tolist(), batch.loss_tokens) == (targets, weights, stats[0])


def logits_of(ids: torch.Tensor) -> torch.Tensor:
    """Logits that depend on the token alone, so that any difference comes from targets and divisors."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1200, 1200, dtype=torch.float64, generator=generator)[ids]


def losses(batches, divisor: float) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        each = F.cross_entropy(logits_of(batch.input_ids[0]), batch.labels[0], reduction="none")
        total += (each * batch.loss_mask[0]).sum()
    return float(total / divisor) if divisor else 0.0


@pytest.mark.parametrize("groups", [[[0], [1]], [[0, 1]], [[1, 0]]])
@pytest.mark.parametrize("average", ["token", "sample"])
def test_l1_lengths_7_and_2_have_one_loss_however_they_are_packed(groups, average):
    """7 shifted targets in all (6 + 1); the mean of the means is something else."""
    samples = [ready(input_ids=list(range(1, 8))), ready(input_ids=[8, 9])]
    stats = [sample.target_stats() for sample in samples]
    assert [count for count, _ in stats] == [6, 1]
    scales = [1.0, 1.0] if average == "token" else [1 / weight for _, weight in stats]
    divisor = sum(weight for _, weight in stats) if average == "token" else 2
    alone = [F.cross_entropy(logits_of(s.tensor("input_ids"))[:-1], s.tensor("labels")[1:], reduction="none") for s in samples]
    want = float(torch.cat(alone).mean()) if average == "token" else float(torch.stack([x.mean() for x in alone]).mean())
    batches = [
        pack_samples([samples[i] for i in group], adapter=TEXT, align=4, weight_scales=[scales[i] for i in group])
        for group in groups
    ]
    assert losses(batches, divisor) == pytest.approx(want, rel=1e-7)
    assert sum(batch.loss_tokens for batch in batches) == 7


def test_l2_l6_the_divisor_is_one_sum_over_the_step(make):
    """Fractional weights: counts are integers, the divisor is their sum, both whatever the packing."""
    rng = np.random.default_rng(1)
    samples = make.random_samples("text", rng, 8)
    weights = [torch.tensor(shift_targets(sample)[1], dtype=torch.float64) for sample in samples]
    divisor = sum(sample.target_stats()[1] for sample in samples)
    assert divisor == pytest.approx(float(torch.cat(weights).sum()), abs=0)
    one = losses([pack_samples(samples, adapter=TEXT)], divisor)
    for cut in range(1, 8):
        batches = [pack_samples(samples[:cut], adapter=TEXT, align=8), pack_samples(samples[cut:], adapter=TEXT, pack_align=32)]
        assert losses(batches, divisor) == pytest.approx(one, rel=1e-12)
        assert sum(batch.loss_tokens for batch in batches) == sum(sample.target_stats()[0] for sample in samples)
        means = [losses([batch], float(batch.loss_mask.sum())) for batch in batches]
        assert np.mean(means) != pytest.approx(one, rel=1e-6), "the mean of means is wrong"


def test_l7_a_pack_without_targets_has_loss_0_and_gradient_0():
    batch = pack_samples([ready(input_ids=[1, 2], labels=[-100, -100])], adapter=TEXT, align=4)
    logits = torch.zeros(4, 9, requires_grad=True)
    (F.cross_entropy(logits, batch.labels[0], reduction="none") * batch.loss_mask[0]).sum().backward()
    assert batch.loss_tokens == 0
    assert torch.equal(logits.grad, torch.zeros(4, 9))


def test_a_label_leaking_over_a_boundary_is_seen():
    """The planted error: labels shifted over the whole row instead of inside each sample."""
    samples = [ready(input_ids=[1, 2, 3]), ready(input_ids=[7, 8])]
    leaking = torch.tensor([[2, 3, 7, 8, -100]])
    batch = pack_samples(samples, adapter=TEXT)
    assert not torch.equal(leaking, batch.labels)
    assert int((leaking != -100).sum()) != batch.loss_tokens == sum(sample.target_stats()[0] for sample in samples)


class TestTruncate:
    """Only whole media items stay, with their features; nothing follows an item that is cut off."""

    def sample(self, make, family="qwen2_5_vl"):
        """3 text, an image of 1 + 4 + 1 tokens (3..9), 2 text (9..11), a video (11..), 2 text."""
        raw = make.raw(family, [3, ("image", 1, 4, 4), 2, ("video", 2, 2, 4), 2])
        return prepare_sample(raw, adapter=adapter_for(family))

    @pytest.mark.parametrize(
        ("limit", "tokens", "images", "videos"),
        [
            (99, 19, 1, 1),
            (17, 17, 1, 1),
            (16, 11, 1, 0),
            (11, 11, 1, 0),
            (9, 9, 1, 0),
            (8, 3, 0, 0),
            (4, 3, 0, 0),
            (2, 2, 0, 0),
        ],
    )
    def test_cut(self, make, limit, tokens, images, videos):
        adapter, sample = adapter_for("qwen2_5_vl"), self.sample(make)
        short = truncate_sample(sample, limit, adapter)
        assert short.num_tokens == tokens == len(short.tensor("labels")) == len(short.tensor("loss_weights"))
        assert (len(short.grids("image")), len(short.grids("video"))) == (images, videos)
        assert len(short.values.get("pixel_values", ())) == 16 * images
        assert len(short.values.get("pixel_values_videos", ())) == 16 * videos
        assert len(short.values.get("second_per_grid_ts", ())) == videos
        types = sample.layout.type_ids()[:tokens]
        assert short.layout.type_ids().tolist() == types.tolist()
        again = {name: value for name, value in short.values.items() if name != "labels"}
        assert prepare_sample(again | {"mm_token_type_ids": torch.from_numpy(types)}, adapter=adapter).num_tokens == tokens
        pack_samples([short], adapter=adapter)

    def test_frames_written_apart_are_one_item(self, make):
        """Two frames of 1 + 1 + 2 + 1 tokens each, from 12 on: cutting the second drops the first too."""
        adapter, sample = adapter_for("qwen3_vl"), self.sample(make, "qwen3_vl")
        assert len(sample.layout.runs) == 3
        short = truncate_sample(sample, sample.num_tokens - 3, adapter)
        assert (len(short.layout.runs), short.grids("video"), short.num_tokens) == (1, [], 12)

    def test_spelled_tokens_are_counted_anew(self, make):
        adapter = adapter_for("qwen2_5_vl")
        raw = {"input_ids": [make.IMAGE, 5, make.VIDEO, 6]}
        assert truncate_sample(prepare_sample(raw, adapter=adapter), 2, adapter).layout.num_spelled == 1

    def test_a_shifted_sample_keeps_the_target_at_the_cut(self):
        sample = ready(tokens=[1, 2, 3], labels=[2, 3, 4], original_seq_len=3)
        short = truncate_sample(sample, 2, TEXT)
        assert short.shifted
        assert shift_targets(short)[0] == [2, 3]

    def test_a_sample_that_begins_with_too_large_an_item_is_named(self, make):
        adapter = adapter_for("qwen2_5_vl")
        sample = prepare_sample(make.raw("qwen2_5_vl", [("image", 1, 4, 4), 2], sample_id="pic"), adapter=adapter)
        with pytest.raises(ValueError, match=r"'pic' begins with a media item of 6 tokens.* truncated to 5"):
            truncate_sample(sample, 5, adapter)
        with pytest.raises(ValueError, match="at least 1, got 0"):
            truncate_sample(sample, 0, adapter)
