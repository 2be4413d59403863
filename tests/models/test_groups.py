"""A group whose members share a prefix computes what each member computes alone, in every family."""

import contextlib

import numpy as np
import pytest
import torch

from benchmarks.families.compare import WithoutCasts
from evenpack.collate import fold_group, pack_samples, prepare_sample
from evenpack.core import UnsafeModelError
from evenpack.models import adapter_for, prepare_model

from . import tiny
from .test_packed import FP32_LOGITS, alone, gradients, largest

pytest.importorskip("transformers")


#: Families that mix dtypes in a way that leaves no room for fp64 throughout.
CASTING = ("glm4v", "glm4v_moe", "ernie4_5_vl_moe", "qwen3_omni_moe")


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def pair(request):
    return request.param, tiny.tiny_model(request.param), prepare_model(tiny.tiny_model(request.param))


def joined(parts, adapter):
    """Return samples end to end as one."""
    fields = [adapter.fields[name] for name in dict.fromkeys(name for part in parts for name in part)]
    return {f.name: torch.cat([part[f.name] for part in parts if f.name in part], dim=f.axis) for f in fields}


def group_raws(adapter, rng, num_members, *, media=(2, 0)):
    """Return members that share a prompt with media, and differ in their answers, which may have media too."""
    prompt = tiny.random_sample(rng, adapter, media=media[0], sides=2, pixels=True)
    if adapter.shares_token and {"image_grid_thw", "video_grid_thw"} <= set(prompt):
        return group_raws(adapter, rng, num_members, media=media)
    members = []
    for number in range(num_members):
        answer = tiny.random_sample(rng, adapter, media=media[1] if number % 2 else 0, sides=2, pixels=True)
        raw = joined([prompt, answer], adapter)
        start = len(prompt["input_ids"]) + 1
        labels = torch.where(raw["mm_token_type_ids"] == 0, raw["input_ids"], -100)
        members.append(raw | {"labels": torch.where(torch.arange(len(labels)) < start, -100, labels)})
    if adapter.shares_token and any({"image_grid_thw", "video_grid_thw"} <= set(raw) for raw in members):
        return group_raws(adapter, rng, num_members, media=media)
    return members


def fold(raws, adapter, groups="prompt"):
    return fold_group([prepare_sample(raw, adapter=adapter) for raw in raws], adapter, groups=groups)


@pytest.mark.parametrize(("sizes", "media", "settings"), [((2, 4), (2, 1), {}), ((8,), (1, 0), {"align": 8, "pack_align": 64})])
def test_every_member_is_as_alone(pair, sizes, media, settings):
    family, stock, prepared = pair
    adapter, rng = adapter_for(stock.config), np.random.default_rng(len(sizes))
    groups = [group_raws(adapter, rng, size, media=media) for size in sizes]
    single = tiny.random_sample(rng, adapter, media=0, pixels=True)
    folded = [fold(raws, adapter) for raws in groups]
    assert all(group.prefix > 0 for group in folded)
    batch = pack_samples([folded[0], single, *folded[1:]], adapter=adapter, **settings)
    flat = [*groups[0], single, *(raw for raws in groups[1:] for raw in raws)]
    plain = family in CASTING
    # Else gradients are rounded once for all members here, and once for each alone.
    with contextlib.nullcontext() if plain else WithoutCasts():
        want = [alone(stock, raw) for raw in flat]
        got = batch.unpack(prepared(**batch.forward_kwargs(prepared)).logits)
        assert batch.total_tokens < sum(map(len, want))
        assert largest(want, got) <= (1e-5 if plain and family in FP32_LOGITS else 1e-12)
        expected, actual = gradients(stock, want), gradients(prepared, got)
    assert expected.keys() == actual.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    assert largest(list(expected.values()), list(actual.values())) / scale <= (1e-5 if plain else 1e-10)
    with torch.no_grad():
        want = [alone(stock, raw) for raw in flat]
        got = batch.unpack(prepared(**batch.forward_kwargs(prepared)).logits)
    assert largest(want, got) <= (1e-5 if family in FP32_LOGITS else 1e-12)


@pytest.mark.parametrize("rope", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen2_5_omni"])
def test_positions_and_ids_are_those_of_members_alone(rope):
    """No integer differs, in random groups; rows hold the prefix once."""
    adapter = adapter_for(tiny.tiny_model(rope).config)
    rng = np.random.default_rng(0)
    for _ in range(40):
        raws = group_raws(adapter, rng, int(rng.integers(1, 6)), media=(int(rng.integers(0, 3)), int(rng.integers(0, 3))))
        group = fold(raws, adapter)
        batch = pack_samples([group], adapter=adapter, align=int(rng.choice([1, 4])))
        assert group.prefix or len(raws) == 1 or not batch.media
        for raw, ids, positions in zip(raws, batch.unpack(batch.input_ids), batch.unpack(batch.position_ids), strict=True):
            plain = pack_samples([raw], adapter=adapter)
            assert torch.equal(ids, plain.input_ids[0]) and torch.equal(positions, plain.position_ids[:, 0])
        for name, rows in batch.media.items():
            own = [member.values[name] for member in group.members if name in member.values]
            assert torch.equal(rows, torch.cat(own, dim=adapter.fields[name].axis))


def test_planted_errors_are_seen(pair):
    """Positions of the row, branches that see each other, a prefix that is not seen: each changes the logits."""
    _, stock, prepared = pair
    adapter = adapter_for(stock.config)
    raws = group_raws(adapter, np.random.default_rng(4), 3, media=(1, 0))
    batch = pack_samples([fold(raws, adapter)], adapter=adapter)
    arguments = batch.forward_kwargs(prepared)
    cu, seen = arguments["cu_seq_lens_q"], arguments["key_index"]
    whole = torch.tensor([0, batch.total_tokens], dtype=torch.int32)
    running = torch.arange(batch.total_tokens, dtype=batch.position_ids.dtype).expand_as(batch.position_ids)
    planted = {
        "positions": {"position_ids": running if running.ndim == 2 else running.contiguous()},
        "branches": {"cu_seq_lens_q": whole, "cu_seq_lens_k": whole, "key_index": torch.arange(batch.total_tokens)},
        "prefix": {"cu_seq_lens_k": cu, "key_index": torch.arange(batch.total_tokens)},
    }
    assert len(seen) > batch.total_tokens
    with torch.no_grad():
        want = prepared(**arguments).logits
        for name, change in planted.items():
            assert float((prepared(**arguments | change).logits - want).abs().max()) > 1e-3, name
        with pytest.raises(UnsafeModelError, match="without key_index"):
            prepared(**{key: value for key, value in arguments.items() if key != "key_index"})
