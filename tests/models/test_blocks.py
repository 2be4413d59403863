"""Tokens that see each other both ways: blocks against a naive mask, and models with such blocks, packed against alone."""

import copy
from typing import Any

import msgspec
import pytest
import torch
import transformers

from evenpack.collate import pack_samples
from evenpack.collate.packs import model_check
from evenpack.core import Field, FieldSet, UnsafeModelError
from evenpack.models import ModelAdapter, adapter_for, prepare_model
from evenpack.models.adapter import TEXT_FIELDS
from evenpack.models.attention.blocks import media_blocks
from evenpack.models.attention.varlen import varlen_attention

from . import tiny
from .test_attention import CAUSAL, LENGTHS, VISION, boundaries, states

#: Blocks of the row of `LENGTHS` = [5, 1, 9, 4]: two images in the third segment, one of them of two parts.
BLOCKS = torch.tensor([[0, 0, 0, -1, -1, 0, -1, 1, 1, 1, 1, 1, -1, 2, 2, 2, -1, 2, -1]])


def who_sees_whom(window: int | None, layers: str) -> torch.Tensor:
    """Return the mask of the row, pair by pair: the slow way."""
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).tolist()
    blocks = BLOCKS[0].tolist()
    mask = torch.zeros(19, 19, dtype=torch.bool)
    for one in range(19):
        for other in range(19):
            causal, same = other <= one, blocks[one] == blocks[other] >= 0
            near = window is None or one - other < window
            if layers == "beyond":
                seen = (causal and near) or same
            elif layers == "sliding" and window is None:
                seen = causal
            else:
                seen = (causal or same) and near
            mask[one, other] = segment[one] == segment[other] and seen
    return mask


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("module", [CAUSAL, VISION], ids=["causal", "both ways"])
@pytest.mark.parametrize("layers", ["all", "sliding", "beyond"])
@pytest.mark.parametrize("window", [None, 2, 3, 100])
def test_blocks_equal_a_mask(window, layers, module, softcap):
    """Output and gradients; the layer's own direction does not count where blocks are given."""

    def run(attend):
        given = [state.requires_grad_() for state in states()]
        output = attend(*given)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
        return [output, *torch.autograd.grad((output * weights).sum(), given)]

    def naive(query, key, value):
        key, value = (states.repeat_interleave(2, 1) for states in (key, value))
        scores = query @ key.transpose(2, 3) * 8**-0.5
        scores = scores if softcap is None else (scores / softcap).tanh() * softcap
        seen = who_sees_whom(window, layers)
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)

    def ours(query, key, value):
        arguments = {"media_blocks": BLOCKS, "media_block_layers": layers, "sliding_window": window, "softcap": softcap}
        return varlen_attention(module, query, key, value, None, cu_seq_lens_q=boundaries(), **arguments)[0]

    for want, got in zip(run(naive), run(ours), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"media_blocks": BLOCKS}, "need the boundaries of segments"),
        ({"media_blocks": BLOCKS[:, 1:], "cu_seq_lens_q": boundaries()}, r"shape \[1, 18\] for a batch of 1 rows of 19"),
        ({"media_blocks": BLOCKS, "cu_seq_lens_q": boundaries([3, 4])}, "boundaries of 7 tokens"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(arguments, said):
    for module in (CAUSAL, VISION):
        with pytest.raises(UnsafeModelError, match=said):
            varlen_attention(module, *states(), None, **arguments)


T, F = True, False


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # A run is a block, also where one segment ends with an image and the next begins with one; padding is of none.
        ({"bidirectional": "image"}, [-1, 0, 0, -1, 1, 2, -1, 3, 3, -1]),
        ({"bidirectional": "image", "bidirectional_tokens": (7,)}, [0, 0, 0, -1, 1, 2, 2, 2, 2, -1]),
        ({"bidirectional": "sample_images"}, [-1, 0, 0, -1, 0, 0, -1, 0, 0, -1]),
        ({"bidirectional": "prefix"}, [0, 0, 0, -1, -1, 0, 0, 0, 0, -1]),
    ],
)
def test_which_tokens_are_a_block(settings, expected):
    found = media_blocks(
        ModelAdapter(name="x", fields=FieldSet(()), **settings),
        input_ids=torch.tensor([[7, 9, 9, 5, 9, 9, 7, 9, 9, 7]]),
        types=torch.tensor([[0, 1, 1, 0, 1, 1, 0, 2, 2, 0]]),
        segment_ids=torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]]),
        labels=torch.tensor([[-100, -100, 3, -100, -100, -100, -100, -100, -100, -100]]),
        padding=torch.tensor([[F, F, F, F, F, F, F, F, F, T]]),
    )
    assert found.tolist() == [expected]


def test_a_prefix_may_be_given():
    found = media_blocks(
        ModelAdapter(name="x", fields=FieldSet(()), bidirectional="prefix"),
        input_ids=torch.zeros(1, 5, dtype=torch.int64),
        types=torch.zeros(1, 5, dtype=torch.int64),
        segment_ids=torch.tensor([[0, 0, 0, 1, 1]]),
        labels=torch.full((1, 5), -100),
        padding=torch.tensor([[F, F, F, F, T]]),
        token_type_ids=torch.tensor([[0, 0, 1, 0, 0]]),
    )
    assert found.tolist() == [[0, 0, -1, 0, -1]]


# Models: 16 patches of 4 x 4 pixels; Gemma 3 pools them to 4 tokens.
IMAGE = 301
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 32, "vision_use_head": False,
}  # fmt: skip
GEMMA = tiny.DENSE | {"head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def gemma3() -> Any:
    rope = {name: {"rope_type": "default", "rope_theta": 10000.0} for name in WINDOWS["layer_types"]}
    text = GEMMA | WINDOWS | {"query_pre_attn_scalar": 8, "rope_parameters": rope}
    config = transformers.Gemma3Config(text_config=text, vision_config=SIGLIP, image_token_id=IMAGE, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def paligemma(kind: str = "gemma") -> Any:
    text = {"model_type": kind, **GEMMA} | (
        {} if kind == "gemma" else WINDOWS | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None}
    )
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=SIGLIP, image_token_id=IMAGE, projection_dim=32)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    # Gemma 2 takes eager attention, which computes its softmax in fp32, because others know no cap; here there is none.
    model.config.text_config._attn_implementation_internal = "sdpa"
    return model


#: Model, what its adapter says, side of the square of tokens of an image.
MODELS = {
    "gemma3": (gemma3, {"bidirectional": "image"}, 2),
    "paligemma": (paligemma, {"bidirectional": "prefix"}, 4),
    "paligemma2": (lambda: paligemma("gemma2"), {"bidirectional": "prefix"}, 4),
}


def built(name: str) -> tuple[Any, ModelAdapter]:
    """Return a random stock model in fp64, and an adapter that gives each of its images as a grid of tokens."""
    build, settings, side = MODELS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    fields = (
        *TEXT_FIELDS,
        Field(name="token_type_ids", kind="token", dtype="int64", pad=1),
        Field(name="pixel_values", kind="media", dtype="float", shape=(3, 16, 16), modality="image", to_model=True),
        Field(name="image_grid_thw", kind="media", dtype="int64", shape=(3,), modality="image"),
    )
    adapter = ModelAdapter(
        name=name,
        fields=FieldSet(fields),
        media_tokens={"image": IMAGE},
        trained_modalities=("image",),
        dummy_grids={"image": (1, side, side)},
        **settings,
    )
    return model, adapter


def samples(adapter: ModelAdapter) -> list[dict[str, Any]]:
    """Return a text, a sample with one image, and one with two; the last three tokens of each are trained."""
    rng = torch.Generator().manual_seed(5)
    length = adapter.token_count("image", adapter.dummy_grids["image"])
    found = []
    for images in (0, 1, 2):
        ids = torch.randint(3, 300, (6,), generator=rng).tolist()
        for _ in range(images):
            ids += [IMAGE] * length + torch.randint(3, 300, (4,), generator=rng).tolist()
        raw: dict[str, Any] = {"input_ids": torch.tensor(ids)}
        raw["labels"] = torch.where(torch.arange(len(ids)) >= len(ids) - 3, raw["input_ids"], -100)
        if images:
            raw["pixel_values"] = torch.randn(images, 3, 16, 16, generator=rng, dtype=torch.float64)
            raw["image_grid_thw"] = torch.tensor([adapter.dummy_grids["image"]] * images)
        found.append(raw)
    return found


def alone(model: Any, adapter: ModelAdapter, raw: dict[str, Any]) -> torch.Tensor:
    """Return a stock model's logits [L, V] of one sample, with the token types of its processor."""
    image = raw["input_ids"] == IMAGE
    types = image.long() if adapter.bidirectional == "image" else (raw["labels"] != -100).long()
    given = {"pixel_values": raw["pixel_values"]} if "pixel_values" in raw else {}
    # PaliGemma counts positions from 1, which shows in rotary tables of fp32 alone.
    given["position_ids"] = torch.arange(len(image))[None]
    return model(input_ids=raw["input_ids"][None], token_type_ids=types[None], use_cache=False, **given).logits[0]


@pytest.fixture(params=MODELS)
def case(request, monkeypatch) -> tuple[Any, ModelAdapter, list[dict[str, Any]]]:
    monkeypatch.setattr(model_check, "check_config", lambda *_: None)  # adapters of these tests, not of the family's config
    model, adapter = built(request.param)
    return model, adapter, samples(adapter)


def packed(model: Any, adapter: ModelAdapter, raws: list[dict[str, Any]], **changes: Any) -> list[torch.Tensor]:
    batch = pack_samples(raws, adapter=adapter, align=changes.pop("align", 1))
    logits = model(**batch.forward_kwargs(model) | changes).logits[0]
    return batch.unpack(logits)


def largest(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).detach().abs().max()) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("align", [1, 8])
def test_a_pack_equals_its_samples_alone(case, align):
    stock, adapter, raws = case
    want = [alone(stock, adapter, raw) for raw in raws]
    model = prepare_model(copy.deepcopy(stock), adapter)
    got = packed(model, adapter, raws, align=align)
    assert largest(want, got) <= 1e-12

    def gradients(owner, logits):
        generator = torch.Generator().manual_seed(7)
        sum((one * torch.randn(one.shape, generator=generator, dtype=one.dtype)).sum() for one in logits).backward()
        return [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]

    expected, actual = gradients(stock, want), gradients(model, got)
    scale = max(float(one.abs().max()) for one in expected)
    assert len(expected) == len(actual) and largest(expected, actual) / scale <= 1e-6, "their norms are computed in fp32"


def test_blocks_that_are_left_out_are_seen(case):
    stock, adapter, raws = case
    model = prepare_model(copy.deepcopy(stock), adapter)
    want = [alone(stock, adapter, raw) for raw in raws]
    with torch.no_grad():
        batch = pack_samples(raws, adapter=adapter)
        none = torch.full_like(batch.input_ids, -1)
        assert largest(want, packed(model, adapter, raws, media_blocks=none)) > 1e-3
        with pytest.raises(UnsafeModelError, match="without media_blocks: tokens of an image"):
            model(**batch.forward_kwargs(model) | {"media_blocks": None})
        other = msgspec.structs.replace(adapter, bidirectional=None)
        if "paligemma" in adapter.name:
            with pytest.raises(UnsafeModelError, match=r"leaves it to its mask.*An adapter with `bidirectional`"):
                packed(model, other, raws)


def test_what_cannot_be_told_of_blocks_is_refused(case):
    stock, adapter, raws = case
    batch = pack_samples(raws, adapter=adapter, align=4)
    with pytest.raises(UnsafeModelError, match="'sdpa', which takes no blocks of tokens that see each other"):
        batch.forward_kwargs(stock)
    with pytest.raises(UnsafeModelError, match=r"bidirectional='\w+'\), and context parallelism.*got 2"):
        batch.shard(0, 2)
    assert batch.shard(0, 1) is batch
    with pytest.raises(UnsafeModelError, match="PackedSeqParams can only say where segments begin"):
        batch.packed_seq_params()
    with pytest.raises(UnsafeModelError, match="Linear takes no media_blocks"):
        batch.forward_kwargs(torch.nn.Linear(2, 2))


def test_gemma_3_packed_the_stock_way_is_wrong():
    """Known fault of transformers 5.24: its sliding layers look blocks up by the position within a segment."""
    model, adapter = built("gemma3")
    raws = samples(adapter)
    want = [alone(model, adapter, raw) for raw in raws]
    batch = pack_samples(raws, adapter=adapter)
    given = {"position_ids": batch.position_ids, "token_type_ids": batch.mm_token_type_ids, "pixel_values": batch.pixel_values}
    got = batch.unpack(model(input_ids=batch.input_ids, use_cache=False, **given).logits[0])
    assert largest(want[:1], got[:1]) < 1e-12 and largest(want[1:], got[1:]) > 0.01


def test_a_prepared_model_still_runs_unpacked(case):
    """Evaluation with padding, as its processor gives it, and generation."""
    stock, adapter, raws = case
    model = prepare_model(copy.deepcopy(stock), adapter)
    for raw in raws:
        torch.testing.assert_close(alone(model, adapter, raw), alone(stock, adapter, raw), rtol=0, atol=1e-12)
    image = raws[1]["input_ids"] == IMAGE
    given = {
        "input_ids": raws[1]["input_ids"][None],
        "pixel_values": raws[1]["pixel_values"],
        "token_type_ids": (image if adapter.bidirectional == "image" else torch.zeros_like(image))[None].long(),
        "attention_mask": torch.ones_like(image)[None].long(),
    }
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(*(one.generate(**given, **settings) for one in (stock, model)))


def test_a_family_without_blocks_gets_none():
    batch = pack_samples([{"input_ids": [1, 2]}], adapter=adapter_for("text"))
    model = prepare_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.DENSE)))
    assert not [name for name in batch.forward_kwargs(model) if "block" in name]


def gemma4() -> Any:
    text = GEMMA | WINDOWS | {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 320, "global_head_dim": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    config = transformers.Gemma4Config(
        text_config=text | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
        vision_config=vision | {"num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
        image_token_id=IMAGE,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def molmo2() -> Any:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Molmo2Config(
        text_config=GEMMA | {"additional_vocab_size": 8},
        vision_config=tower | {"num_hidden_layers": 1, "patch_size": 4, "image_size": [16, 16]},
        adapter_config=tower | {"text_hidden_size": 32, "vision_feature_layer": [-1]},
        image_token_id=IMAGE,
    )
    return transformers.Molmo2ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "layers", "blocks_of"),
    [
        (gemma4, "sliding", lambda types: torch.where(types > 0, types, -1)),  # a block per run, in layers with a window
        (molmo2, "beyond", lambda types: torch.where(types > 0, 0, -1)),  # one block per sample
    ],
)
def test_decoders_with_blocks_of_other_kinds(build, layers, blocks_of):
    """By type ids alone, without pixels: two samples with images, and what they compute alone; in training too."""
    torch.manual_seed(0)
    stock = build().double()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    adapter = ModelAdapter(name="blocks", fields=FieldSet(TEXT_FIELDS), bidirectional="image", media_tokens={"image": IMAGE})
    model = prepare_model(copy.deepcopy(stock), adapter)
    ids = torch.randint(3, 300, (1, 30))
    types = torch.tensor([[0, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 0, 0, 4, 4, 4, 4, 0]])
    given = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(18), torch.arange(12)])[None],
        "cu_seq_lens_q": torch.tensor([0, 18, 30], dtype=torch.int32),
        "media_blocks": blocks_of(types),
        "media_block_layers": layers,
    }
    given["mm_token_type_ids"] = torch.zeros_like(types)  # Molmo 2 insists on them
    got = model(**given, use_cache=False).logits[0]
    parts = zip(ids.split([18, 12], dim=1), (types > 0).long().split([18, 12], dim=1), strict=True)
    want = torch.cat([stock(input_ids=one, mm_token_type_ids=kinds, use_cache=False).logits[0] for one, kinds in parts])
    assert float((got - want).detach().abs().max()) <= 1e-12
    with torch.no_grad():
        without = model(**given | {"media_blocks": torch.full_like(types, -1)}, use_cache=False).logits[0]
    assert float((without - want).detach().abs().max()) > 1e-3
