"""What arrives through `get_packed_batch` and `next_batch` where packing systems go wrong: values, on every rank."""

import itertools

import msgspec
import pytest
import torch

from evenpack.core import FieldShapeError
from evenpack.integrations.megatron import next_batch
from evenpack.integrations.megatron.ranks import Ranks
from evenpack.integrations.megatron.settings import scheduler_config
from evenpack.models import adapter_for
from evenpack.scheduler import SchedulerConfig

from .helpers import (
    Samples,
    megatron_sample,
    on_ranks,
    own_sample,
    own_samples,
    place,
    settings,
    taken,
    wrap,
    wrap_data_iterator,
)

IMAGE = 60
VISION = msgspec.structs.replace(
    adapter_for("qwen2_vl"), media_tokens={"image": IMAGE, "video": 61}, vision_start=58, vision_end=59, pad_token_id=0
)
FROZEN = msgspec.structs.replace(VISION, trained_modalities=())


def image_sample(name, before, images, after, value=0.0):
    """Return a sample with images of 4 features each between its text, every pixel of them of one value."""
    ids = [*before, *[58, *[IMAGE] * 4, 59] * images, *after]
    sample = {"input_ids": torch.tensor(ids), "sample_id": name}
    if images:
        sample["pixel_values"] = torch.full((16 * images, VISION.patch_dim), value)
        sample["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
    return sample


def ids_of(text):
    """Return a sample of these token ids."""
    return {"input_ids": torch.tensor(text)}


# Boundaries ---------------------------------------------------------------------------------------------------------


def test_boundaries_do_not_come_from_positions():
    """Positions that stand still within a segment, and start at 0 in both."""
    pixels = {"pixel_values": torch.zeros(16, VISION.patch_dim), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    items = [ids_of([*[IMAGE] * 4, 7, 8]) | pixels, ids_of([1, 2, 3])]
    ((row,),) = on_ranks(taken(items, adapter=FROZEN), 1)
    assert row["position_ids"][0] == [[0, 0, 0, 0, 2, 3, 0, 1, 2]]
    assert row["params"]["cu_seqlens_q"] == row["params"]["cu_seqlens_q_padded"] == [0, 6, 9]


@pytest.mark.parametrize(
    ("lengths", "one_object"), [([4, 8], True), ([3, 8], False)], ids=["nothing is padded", "something is padded"]
)
def test_padded_boundaries_are_always_there_and_one_object_with_the_real_ones_where_nothing_is_padded(lengths, one_object):
    """On ranks that got them over the wire, too: Transformer Engine tells by identity."""
    for (row,) in on_ranks(taken(own_samples(lengths)), 4, cp=2, pp=2):
        assert row["params"]["cu_seqlens_q_padded"] == row["params"]["cu_seqlens_kv_padded"] == [0, 4, 12]
        assert row["same"] == one_object
        assert row["params"].get("pad_between_seqs", not one_object) == (not one_object)
        assert row["params"].get("total_tokens", 12) == 12


@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 3, 9], [0, 4, 3, 5], []])
def test_a_row_that_is_longer_than_its_boundaries_is_refused_on_every_rank(bounds):
    def body():
        row = {name: megatron_sample(5, 1)[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        row["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        with pytest.raises(FieldShapeError, match="cu_seqlens must rise from 0 to the row's 5 tokens"):
            wrap(Samples([row if place().dp else megatron_sample(5, 0)]), 1)
        return True

    assert on_ranks(body, 4, tp=2) == [True] * 4


@pytest.mark.parametrize("lengths", [[3, 2], [1], [7, 7, 1]])
def test_boundaries_end_where_the_row_ends(lengths):
    """A tail is a segment of its own, whose real boundary is repeated."""
    for (row,) in on_ranks(taken(own_samples(lengths), pack_align=16), 2, cp=2):
        params = row["params"]
        assert params["cu_seqlens_q_padded"][-1] == 2 * len(row["tokens"][0]) and params["cu_seqlens_q_padded"][-1] % 16 == 0
        assert params["cu_seqlens_q"][-1] == sum(lengths) and len(params["cu_seqlens_q"]) == len(params["cu_seqlens_q_padded"])


#: Sequence parallelism, FP8 recipe, slots of a segment of 100 tokens, slots of the row of 64 such segments.
BLOCKS = [
    (False, None, 100, 6400),
    (True, None, 104, 6656),
    (False, "blockwise", 100, 6400),
    (True, "blockwise", 104, 6656),
    (True, "mxfp8", 104, 6656),
    (False, "delayed", 100, 6400),
]


@pytest.mark.parametrize(("sequence_parallel", "recipe", "segment", "row_slots"), BLOCKS)
def test_blocks_of_an_fp8_recipe_pad_the_row_once_and_never_its_segments(sequence_parallel, recipe, segment, row_slots):
    sizes = {None: 1, "delayed": 16, "mxfp8": 32, "blockwise": 128}
    config = settings(
        sequence_parallel=sequence_parallel,
        max_seqlen_per_dp_cp_rank=4096,
        fp8="e4m3" if recipe else None,
        fp8_recipe=recipe,
    )
    block = sizes[recipe] * 2 * (2 if sequence_parallel else 1)
    for count in (64, 61):
        for (row,) in on_ranks(taken([own_sample(100, n) for n in range(count)], config=config), 4, tp=2, cp=2):
            padded = row["params"]["cu_seqlens_q_padded"]
            assert padded[: count + 1] == list(range(0, segment * count + 1, segment))
            assert padded[-1] == -(-segment * count // block) * block
            assert count < 64 or padded[-1] == row_slots
            assert len(row["tokens"][0]) * 2 == padded[-1]


class Group:
    """A process group of a size, which is all that settings ask for."""

    def __init__(self, size):
        self.size = lambda: size


#: Sequence parallelism, recipe, what else the user sets; multiples of segments and rows with context parallelism of 4 and
#: tensor parallelism of 8, or the error.
ALIGNMENTS = [
    (False, "blockwise", None, (8, 512)),
    (True, "blockwise", None, (64, 4096)),
    (True, "blockwise", {}, (64, 4096)),
    (True, "mxfp8", {"align": 192}, (192, 3072)),
    (False, "custom", {"align": 8, "pack_align": 64}, (8, 64)),
    (False, "custom", {}, "fp8_recipe='custom'"),
    (True, "blockwise", {"pack_align": 512}, "pack_align=512 must be a multiple of 4096"),
    (True, None, {"align": 8}, "align=8 must be a multiple of 64"),
]


@pytest.mark.parametrize(("sequence_parallel", "recipe", "given", "expected"), ALIGNMENTS)
def test_alignment_of_settings_follows_the_config(sequence_parallel, recipe, given, expected):
    ranks = Ranks(dp=Group(1), tp=Group(8), cp=Group(4), pp=Group(1))
    config = settings(sequence_parallel=sequence_parallel, fp8=recipe and "e4m3", fp8_recipe=recipe)
    own = None if given is None else SchedulerConfig(max_tokens=8192, samples_per_step=1, **given)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            scheduler_config(config, own, ranks, 4, 1)
    else:
        found = scheduler_config(config, own, ranks, 4, 1)
        assert (found.align, found.pack_align) == expected


# Targets ------------------------------------------------------------------------------------------------------------


def test_no_segment_learns_the_first_token_of_the_next():
    ((row,),) = on_ranks(taken([ids_of([1, 2, 3]), ids_of([7, 8])]), 1)
    assert row["tokens"] == [[1, 2, 3, 7, 8]]
    assert row["labels"] == [[2, 3, -100, 8, -100]]
    assert row["loss_mask"] == [[1, 1, 0, 1, 0]]


# Media --------------------------------------------------------------------------------------------------------------


def test_images_follow_their_samples():
    """One replica has no image at all, the other one sample with two: each feature's pixels are its own sample's."""

    def body():
        here = place()
        if here.dp == 0:
            items = [own_sample(9 + n, f"0-{n}") for n in range(6)]
        else:
            counts = [2, 0, 1, 2, 0, 1]
            items = [image_sample(f"1-{n}", [1] * (5 * n + 1), count, [2], float(n)) for n, count in enumerate(counts)]
        iterator, count, _, _ = wrap(Samples(items), 6, adapter=VISION)
        found = []
        for _ in range(count):
            batch = next_batch(iterator)
            pixels, index = batch.further.get("pixel_values"), batch.further.get("media_feature_index")
            bounds = batch.packed_seq_params.cu_seqlens_q_padded.tolist()
            for name, (start, stop) in zip(batch.sample_ids, itertools.pairwise(bounds), strict=True):
                if name is not None and index is not None:
                    own = [at for at in index[0, start:stop].tolist() if at >= 0]
                    found.append((name, [pixels[4 * at : 4 * at + 4].unique().tolist() for at in own]))
        return here.pp, found, place().reads

    results = on_ranks(body, 4, pp=2)
    assert all(not found for pp, found, _ in results if pp == 1), "the tower is on the first stage"
    found = dict(entry for _, rank, reads in results if reads for entry in rank)
    expected = {f"0-{n}": [] for n in range(6)}
    expected |= {f"1-{n}": [[float(n)]] * 4 * count for n, count in enumerate([2, 0, 1, 2, 0, 1])}
    assert found == expected


@pytest.mark.parametrize("slicing", ["caller", "model"])
def test_an_image_that_a_chunk_boundary_cuts(slicing):
    """Chunks of 2 slots; the features lie in slots 2 to 5, so both ranks hold two of them."""
    sample = image_sample("image", [7], 1, [8])
    adapter = msgspec.structs.replace(FROZEN, cp_slicing=slicing)

    def body():
        config = SchedulerConfig(max_tokens=64, samples_per_step=1)
        iterator, _, _, _ = wrap(Samples([sample]), 1, adapter=adapter, settings=config)
        batch = next_batch(iterator)
        return batch.tokens.tolist(), batch.further["media_feature_index"].tolist(), batch.further["pixel_values"].shape[0]

    tokens, index = [7, 58, IMAGE, IMAGE, IMAGE, IMAGE, 59, 8], [-1, -1, 0, 1, 2, 3, -1, -1]
    for slots, found in zip(([0, 1, 6, 7], [2, 3, 4, 5]), on_ranks(body, 2, cp=2), strict=True):
        mine = slots if slicing == "caller" else range(8)
        assert found == ([[tokens[slot] for slot in mine]], [[index[slot] for slot in mine]], 16)


# Ranks --------------------------------------------------------------------------------------------------------------


def test_a_replica_without_samples_gets_its_share_from_the_others():
    def body():
        items = [own_sample(20, f"{n}") for n in range(6)]
        # One source that is empty, one that goes on but has nothing in its items.
        source = Samples({0: items, 1: [], 2: [[]] * 6}[place().dp])
        iterator, count, total, _ = wrap(source, 6, settings(max_seqlen_per_dp_cp_rank=40))
        names = [name for _ in range(count) for name in next_batch(iterator).sample_ids]
        return names, total

    results = on_ranks(body, 3)
    assert sorted(name for names, _ in results for name in names) == [f"{n}" for n in range(6)]
    assert [(len(names), total) for names, total in results] == [(2, 120)] * 3


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "cp-tp-pp-ep-dp", "pp-dp-ep-cp-tp"])
def test_peers_of_a_replica_run_the_same_plan(order):
    def body():
        here, steps = place(), []
        source = Samples([own_sample(3 + (5 * n + here.dp) % 17, f"{here.dp}-{n}") for n in range(12)])
        for _ in range(3):
            iterator, count, total, squares = wrap(source, 4, settings(max_seqlen_per_dp_cp_rank=16))
            for _ in range(count):
                batch = next_batch(iterator)
                steps.append((count, total, squares, batch.sample_ids, batch.packed_seq_params.cu_seqlens_q.tolist()))
        return here.dp, steps

    seen = {}
    for dp, steps in on_ranks(body, 8, order=order, tp=2, cp=2):
        assert seen.setdefault(dp, steps) == steps
    names = [name for steps in seen.values() for *_, names, _ in steps for name in names if name is not None]
    assert sorted(names) == sorted(f"{dp}-{n}" for dp in range(2) for n in range(12))


def test_what_is_done_to_one_micro_batch_changes_no_other():
    """Neither the other model chunk's, nor a later one, nor the sample that it came from."""

    def body():
        items = [own_sample(5, n) for n in range(4)]
        before = [item["input_ids"].clone() for item in items]
        config = SchedulerConfig(max_tokens=5, samples_per_step=1, microbatch_multiple=2)
        source = Samples(items) if place().reads else None
        (first, second), count, _, _ = wrap_data_iterator(
            [source] * 2,
            settings(virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=2),
            4,
            settings=config,
        )
        names = []
        for _ in range(count):
            pack = next(first)
            names.append(list(pack["sample_ids"]))
            pack["sample_ids"].append("other")
            pack["token_axes"]["other"] = 0
            if "tokens" in pack:
                pack["tokens"] += 1
            del pack["cu_seqlens"]
        packs = [next(second) for _ in range(count)]
        assert all("cu_seqlens" in pack and pack["token_axes"] == {} for pack in packs)
        assert [pack["sample_ids"] for pack in packs] == names
        return all(torch.equal(item["input_ids"], ids) for item, ids in zip(items, before, strict=True))

    assert on_ranks(body, 2, pp=2, vpp=2) == [True, True]
