"""What a sample may hold, on one rank or another, and what comes of it on all of them."""

import pytest
import torch

from evenpack.core import EvenpackError, Field, MissingFieldError, PeerFailedError, UndeclaredFieldError
from evenpack.integrations.megatron import next_batch, to_bridge
from evenpack.scheduler import SchedulerConfig

from .helpers import Samples, megatron_sample, on_ranks, own_sample, place, wrap


def test_keys_may_come_in_any_order_and_optional_ones_be_absent_on_one_rank():
    def body():
        here = place()
        sample = megatron_sample(7, here.dp)
        if here.dp:
            sample = dict(reversed(sample.items()))
            del sample["loss_mask"], sample["position_ids"], sample["padded_seq_len"]
        iterator, count, total, _ = wrap(Samples([sample, dict(sample)]), 2)
        return total, sum(float(next(iterator)["loss_mask"].sum()) for _ in range(count))

    results = on_ranks(body, 2)
    assert [total for total, _ in results] == [28, 28]
    weights = float(megatron_sample(7, 0)["loss_mask"].sum())
    assert sum(found for _, found in results) == 2 * weights + 14


def broken():
    yield own_sample(4, 0)
    raise RuntimeError("disk on fire")


BAD = [
    (UndeclaredFieldError, "colour", lambda: Samples([own_sample(4, 0) | {"colour": 3}] * 4)),
    (PeerFailedError, "disk on fire", broken),
    (EvenpackError, "token", lambda: Samples([megatron_sample(4, 0) | {"original_seq_len": 9}] * 4)),
]


@pytest.mark.parametrize(("kind", "text", "source"), BAD)
def test_what_goes_wrong_on_one_rank_is_raised_on_all(kind, text, source):
    def body():
        items = source() if place().dp else Samples([own_sample(4, n) for n in range(4)])
        with pytest.raises(kind, match=text) as caught:
            wrap(items, 2)
        return str(caught.value)

    assert len(set(on_ranks(body, 4, tp=2))) == 1


def test_declared_fields_of_any_kind_follow_their_sample():
    fields = (
        Field(name="reward", kind="token", dtype="int16", default=0),
        Field(name="origin", kind="sample", dtype="text"),
    )

    def body():
        here = place()
        samples = []
        for n in range(5):
            sample = own_sample(3 + n, f"{here.dp}-{n}")
            reward = torch.full((3 + n,), 10 * here.dp + n, dtype=torch.int16)
            samples.append(sample | {"reward": reward, "origin": f"file {here.dp}-{n}"})
        iterator, count, _, _ = wrap(Samples(samples), 5, fields=fields)
        for pack in (next(iterator) for _ in range(count)):
            bounds = pack["cu_seqlens_padded"].tolist()
            for name, origin, start in zip(pack["sample_ids"], pack["origin"], bounds, strict=False):
                if name is not None:
                    dp, n = map(int, name.split("-"))
                    assert origin == f"file {name}" and pack["reward"].dtype == torch.int16
                    assert pack["reward"][start] == 10 * dp + n
        return True

    assert all(on_ranks(body, 4, tp=2))


def test_an_optional_field_on_one_sample_takes_its_default_on_the_others_and_a_required_one_is_missed_by_name():
    """`position_hint` has its tokens along the second axis of `[3, L]`: it arrives as `[3, 1, T]`, cut like the tokens."""
    hint = Field(name="position_hint", kind="token", dtype="int64", shape=(3,), axis=1, default=7, pad=-1)
    origin = Field(name="origin", kind="sample", dtype="text", required=True)

    def body():
        here = place()
        items = [own_sample(8, f"{here.dp}-{n}") for n in range(3)]
        if here.dp:
            items[1]["position_hint"] = torch.arange(24).reshape(3, 8)
        iterator, count, _, _ = wrap(Samples(items), 3, fields=[hint])
        found = []
        for batch in (next_batch(iterator) for _ in range(count)):
            column = batch.further["position_hint"]
            assert column.shape == (3, *batch.tokens.shape)
            parts = column.split(4, dim=2)  # a segment of 8, cut in two
            found += [(name, part.tolist()) for name, part in zip(batch.sample_ids, parts, strict=True)]
        with pytest.raises(MissingFieldError, match="origin"):
            wrap(Samples([item | {"origin": "file"} if not here.dp else item for item in items]), 3, fields=[origin])
        return here.cp, found

    whole = torch.arange(24).reshape(3, 8)
    for cp, found in on_ranks(body, 4, cp=2):
        mine = whole[:, [0, 1, 6, 7] if cp == 0 else [2, 3, 4, 5]]
        for name, part in found:
            assert part == (mine if name == "1-1" else torch.full((3, 4), 7))[:, None].tolist()


def test_sums_above_two_to_the_24_are_exact():
    """4,099 squared is odd and above 2**24: a sum that went through float32 on its way would be even."""

    def body():
        items = Samples([own_sample(4099, n) for n in range(3)])
        _, _, total, squares = wrap(items, 3, settings=SchedulerConfig(max_tokens=8192, samples_per_step=1))
        return total, squares

    assert on_ranks(body, 4, tp=2) == [(6 * 4099, 6 * 4099**2)] * 4


#: Keys that Megatron-Bridge's `vlm_step` keeps.
KEPT = {
    "tokens", "input_ids", "position_ids", "labels", "loss_mask", "attention_mask", "visual_inputs", "cu_seqlens_q",
    "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
}  # fmt: skip


@pytest.mark.parametrize("align", [1, 8])
def test_bridge_keeps_every_key_it_is_given(align):
    def body():
        items = Samples([own_sample(5, 0), own_sample(9, 1)])
        iterator, _, _, _ = wrap(items, 2, settings=SchedulerConfig(max_tokens=64, samples_per_step=1, align=align))
        found = to_bridge(next(iterator))
        assert found["tokens"] is found["input_ids"] and found["tokens"].shape == found["position_ids"].shape
        assert found["visual_inputs"].normalized_for_model() == {}
        return set(found)

    padded = {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
    assert on_ranks(body, 1) == [KEPT if align > 1 else KEPT - padded]
