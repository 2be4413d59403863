"""The loss of packs: shares of one mean, whatever the packs and the shards (L1, L2)."""

import pytest
import torch
import torch.nn.functional as F

from evenpack.collate import pack_samples
from evenpack.core import FieldShapeError
from evenpack.scheduler.loss import packed_loss
from evenpack.scheduler.testing import run_ranks

from .helpers import TEXT, VISION, VOCABULARY, open_scheduler, text_sample


def logits_of(batch, dtype=torch.float64):
    """Return logits that depend on each token alone, as a model without attention gives them."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return table[batch.input_ids].to(dtype)


def sample_loss(sample):
    """Return summed cross entropy and number of targets of one sample alone."""
    ids = sample["input_ids"]
    logits = logits_of(pack_samples([sample], adapter=TEXT))[0]
    return F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item(), len(ids) - 1


@pytest.mark.parametrize("average", ["token", "sample"])
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 100), (1, 8), (2, 9), (3, 100)])
def test_mean_is_the_same_packed_and_alone(average, num_ranks, max_tokens):
    """Lengths 7 and 2 have 6 and 1 targets: a mean of means would weigh them alike."""
    lengths = [7, 2, 5, 1]
    samples = [text_sample(length, f"{rank}-{length}") for rank in range(num_ranks) for length in lengths]
    alone = [sample_loss(sample) for sample in samples]
    if average == "token":
        expected = sum(total for total, _ in alone) / sum(count for _, count in alone)
    else:
        means = [total / count for total, count in alone if count]  # a sample of one token has no target
        expected = sum(means) / len(means)

    def fn(rank, num_ranks):
        mine = samples[rank * len(lengths) : (rank + 1) * len(lengths)]
        with open_scheduler(mine, max_tokens=max_tokens, loss_average=average) as scheduler:
            step = next(scheduler)
            assert step.global_loss_tokens == sum(count for _, count in alone)
            return [
                sum(step.loss(logits_of(batch), batch, reduce=reduce).item() for batch in step) for reduce in ("sum", "mean")
            ]

    sums, means = zip(*run_ranks(fn, num_ranks), strict=True)
    assert sum(sums) == pytest.approx(expected, rel=1e-6)
    assert sum(means) / num_ranks == pytest.approx(expected, rel=1e-6)  # what a wrapper that averages makes of it


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("adapter", [TEXT, VISION])
def test_shards_add_up_to_the_pack(cp_size, adapter):
    """Also where the model cuts the row itself and only its logits are local."""
    samples = [text_sample(length, length) for length in (5, 17, 3)]
    batch = pack_samples(samples, adapter=adapter, align=2 * cp_size)
    whole = packed_loss(logits_of(batch), batch, divisor=22.0, num_replicas=1)
    shards = [batch.shard(rank, cp_size) for rank in range(cp_size)]
    parts = [packed_loss(logits_of(batch)[:, shard.cp_indices], shard, divisor=22.0, num_replicas=1).item() for shard in shards]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "reduce", "text"), [((1, 4, 9), "mean", "got"), ((5, 9), "mean", "got"), ((1, 5, 9), "max", "reduce")]
)
def test_logits_that_do_not_fit_are_refused(shape, reduce, text):
    batch = pack_samples([text_sample(5, 0)], adapter=TEXT)
    with pytest.raises(ValueError, match=text):
        packed_loss(torch.zeros(shape), batch, divisor=1.0, num_replicas=1, reduce=reduce)


def test_loss_is_computed_in_full_precision():
    batch = pack_samples([text_sample(50, 0)], adapter=TEXT)
    half = packed_loss(logits_of(batch, torch.bfloat16), batch, divisor=49.0, num_replicas=1)
    exact = packed_loss(logits_of(batch, torch.bfloat16).double(), batch, divisor=49.0, num_replicas=1)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(exact.item(), rel=1e-5)


def test_a_loss_weight_below_zero_is_an_error_on_every_rank():
    """Weights that cancel leave a loss no divisor, or one of the other sign."""

    def fn(rank, num_ranks):
        weights = torch.full((5,), -2.0 if rank else 1.0)
        source = [{**text_sample(5, str(rank)), "loss_weights": weights}]
        message = r"rank 1, sample '1': loss_weights\[0\] is -2, weights must be at least 0"
        with open_scheduler(source) as scheduler, pytest.raises(FieldShapeError, match=message):
            next(scheduler)

    run_ranks(fn, 2)
