"""What holds for every pack: packing and unpacking, cutting and joining are inverse, and the loss knows no packing."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenpack.collate import pack_samples, prepare_sample, truncate_sample
from evenpack.models import adapter_for

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
SIDES = st.sampled_from([2, 4, 6])
ITEM = st.one_of(
    st.tuples(st.just("image"), st.just(1), SIDES, SIDES),
    st.tuples(st.just("video"), st.integers(1, 3), SIDES, SIDES),
)
PARTS = st.lists(st.one_of(st.integers(1, 12), ITEM), max_size=4).map(lambda parts: [*parts, 1])
FAMILY = st.sampled_from(["qwen2_5_vl", "qwen3_vl"])
BATCH = st.lists(PARTS, min_size=1, max_size=6)


def ready(make, family: str, batch: list, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    samples = []
    for index, parts in enumerate(batch):
        raw = make.raw(family, parts, rng, sample_id=index)
        length = len(raw["input_ids"])
        raw["loss_weights"] = torch.from_numpy(rng.choice([0.0, 0.5, 1.0], length).astype(np.float32))
        raw["labels"] = torch.where(torch.from_numpy(rng.random(length) < 0.3), -100, raw["input_ids"])
        samples.append(prepare_sample(raw, adapter=adapter_for(family)))
    return samples


@QUICK
@given(family=FAMILY, batch=BATCH, align=st.integers(1, 16), factor=st.integers(1, 4))
def test_unpacking_gives_the_samples_back(make, family, batch, align, factor):
    samples = ready(make, family, batch)
    pack = pack_samples(samples, adapter=adapter_for(family), align=align, pack_align=align * factor)
    assert pack.sample_ids[: len(samples)] == list(range(len(samples)))
    types = pack.unpack(pack.mm_token_type_ids)
    for sample, ids, kinds in zip(samples, pack.unpack(pack.input_ids), types, strict=True):
        assert torch.equal(ids, sample.tensor("input_ids"))
        assert kinds.tolist() == sample.layout.type_ids().tolist()
    assert torch.equal(torch.cat(pack.unpack(pack.labels)), pack.labels[0][~pack.padding_mask[0]])
    slots = [((pack.segment_ids[0] == k) & ~pack.padding_mask[0]).nonzero().flatten() for k in range(len(samples))]
    row = torch.randn(pack.total_tokens)
    for got in (pack.unpack(row), pack.unpack(row[None]), [part[:, 0] for part in pack.unpack(row[None, :, None])]):
        assert all(torch.equal(part, row[own]) for part, own in zip(got, slots, strict=True))
    for part, own in zip(pack.unpack(pack.position_ids), slots, strict=True):
        assert torch.equal(part, pack.position_ids[:, 0, own]), "three axes of positions, even where the row has 3 slots"


@QUICK
@given(family=FAMILY, batch=BATCH, size=st.sampled_from([2, 3, 4, 8]), factor=st.integers(1, 3))
def test_shards_are_a_partition_and_join_to_the_pack(make, family, batch, size, factor):
    pack = pack_samples(ready(make, family, batch), adapter=adapter_for(family), align=2 * size, pack_align=2 * size * factor)
    shards = [pack.shard(rank, size, slicing="caller") for rank in range(size)]
    slots = torch.cat([shard.cp_indices for shard in shards])
    assert slots.sort().values.tolist() == list(range(pack.total_tokens))
    for name, (tensor, axis) in pack.token_tensors().items():
        assert torch.equal(pack.unshard([shard.token_tensors()[name][0] for shard in shards], axis), tensor), name


def summed_loss(pack, table: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(table[pack.input_ids[0] % len(table)], pack.labels[0] % len(table), reduction="none")
    return (each * pack.loss_mask[0]).sum()


@QUICK
@given(data=st.data(), batch=BATCH, align=st.integers(1, 9))
def test_the_loss_knows_no_packing(make, data, batch, align):
    """Any partition, any order, any padding: one sum of losses and one divisor."""
    samples = ready(make, "qwen2_5_vl", batch)
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))
    order = data.draw(st.permutations(range(len(samples))))
    table = torch.randn(50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    adapter = adapter_for("qwen2_5_vl")
    alone = [summed_loss(pack_samples([sample], adapter=adapter), table) for sample in samples]
    packs = [
        pack_samples([samples[i] for i in order if groups[i] == group], adapter=adapter, align=align)
        for group in sorted(set(groups))
    ]
    torch.testing.assert_close(sum(summed_loss(pack, table) for pack in packs), sum(alone), rtol=1e-12, atol=1e-12)
    assert sum(pack.loss_tokens for pack in packs) == sum(sample.target_stats()[0] for sample in samples)
    assert sum(float(pack.loss_mask.double().sum()) for pack in packs) == sum(sample.target_stats()[1] for sample in samples)


@QUICK
@given(family=FAMILY, parts=PARTS, limit=st.integers(1, 40))
def test_truncation_keeps_a_beginning_of_whole_items(make, family, parts, limit):
    (sample,) = ready(make, family, [[1, *parts]])
    short = truncate_sample(sample, limit, adapter_for(family))
    assert 1 <= short.num_tokens <= max(limit, 1)
    assert torch.equal(short.tensor("input_ids"), sample.tensor("input_ids")[: short.num_tokens])
    pack = pack_samples([short], adapter=adapter_for(family))
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grids = sample.grids(kind)[: len(short.grids(kind))]
        assert short.grids(kind) == grids
        assert len(short.values.get(pixels, ())) == sum(t * h * w for t, h, w in grids)
        code = {"image": 1, "video": 2}[kind]
        assert int((pack.mm_token_type_ids == code).sum()) == sum(t * h * w for t, h, w in grids) // 4
