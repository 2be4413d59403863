"""A pack computes what its samples compute alone: logits and gradients, with the real transformers classes in fp64.

The reference is the stock model on each sample, unpacked, with the positions that it derives itself.
"""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from evenpack.collate import pack_samples
from evenpack.core import SpelledMediaTokenError
from evenpack.models import adapter_for, dummy_sample, prepare_model
from evenpack.models.attention.varlen import padding_only_mask, varlen_attention
from evenpack.models.layout.items import media_grids

from . import tiny

pytest.importorskip("transformers")

# Families that compute a part in fp32 whatever the model's dtype: Gated DeltaNet its chunks (whose size padding changes),
# routers their scores, GLM's vision tower its position embeddings, Cohere's norms their weights. Packing takes their sums in
# another order.
FP32_LOGITS = ("qwen3_5", "qwen3_5_moe", "glm4v_moe")
FP32_GRADIENTS = (*FP32_LOGITS, "glm4v", "ernie4_5_vl_moe", "cohere_compass")


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def pair(request) -> tuple[str, Any, Any]:
    """A family's stock model, and one with the same weights that was prepared for packs."""
    stock, prepared = tiny.tiny_model(request.param), tiny.tiny_model(request.param)
    return request.param, stock, prepare_model(prepared)


def samples_for(adapter, seed: int = 0, media: tuple[int, ...] = (2, 0, 3, 1)) -> list[dict[str, Any]]:
    """Return raw samples; one has all of the family's modalities."""
    rng = np.random.default_rng(seed)
    raws = [tiny.random_sample(rng, adapter, media=count, sides=2, pixels=True) for count in media]
    while not all(any(media_grids(raw, adapter).get(name) is not None for raw in raws) for name in adapter.media_tokens):
        raws.append(tiny.random_sample(rng, adapter, media=3, sides=2, pixels=True))
    return raws


def alone(model, raw: dict[str, Any]) -> torch.Tensor:
    """Return a stock model's logits [L, V] of one sample, called as its users call it."""
    taken = inspect.signature(model.forward).parameters
    given = {name: value[None] if name.endswith("_ids") else value for name, value in raw.items() if name in taken}
    return model(**given, attention_mask=torch.ones(1, len(raw["input_ids"]), dtype=torch.int64), use_cache=False).logits[0]


def packed(model, raws: list[dict[str, Any]], adapter, **settings) -> list[torch.Tensor]:
    """Return a prepared model's logits of each sample of a pack."""
    batch = pack_samples(raws, adapter=adapter, **settings)
    logits = model(**batch.forward_kwargs(model)).logits[0]
    starts = batch.cu_seqlens_q_padded.tolist()
    return [logits[start : start + len(raw["input_ids"])] for start, raw in zip(starts, raws, strict=False)]


def score(logits: list[torch.Tensor]) -> torch.Tensor:
    """Return a loss with a different weight at every logit, so that no error cancels."""
    generator = torch.Generator().manual_seed(7)
    return sum((part * torch.randn(part.shape, generator=generator, dtype=part.dtype)).sum() for part in logits)


def gradients(model, logits: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    score(logits).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("settings", [{}, {"align": 8, "pack_align": 64}], ids=["dense", "padded"])
def test_logits_and_gradients(pair, settings):
    family, stock, prepared = pair
    adapter = adapter_for(stock.config)
    raws = samples_for(adapter)
    if adapter.shares_token:  # a stock GLM cannot run images and videos in one row, and neither can the reference
        raws = [raw for raw in raws if not {"image_grid_thw", "video_grid_thw"} <= set(raw)]
    want, got = [alone(stock, raw) for raw in raws], packed(prepared, raws, adapter, **settings)
    assert largest(want, got) <= (1e-5 if family in FP32_LOGITS else 1e-12)

    expected, actual = gradients(stock, want), gradients(prepared, got)
    assert expected.keys() == actual.keys() and any("vis" in name for name in expected)
    scale = max(float(g.abs().max()) for g in expected.values())
    error = largest(list(expected.values()), list(actual.values())) / scale
    assert error <= (1e-5 if family in FP32_GRADIENTS else 1e-10)


def test_modalities_that_share_a_tower_train_the_same_weights(pair):
    """So a dummy image is enough for DDP where a pack has neither images nor videos, and none where it has one of them."""
    _, _, prepared = pair
    adapter = adapter_for(prepared.config)
    for group in adapter.shared_towers:
        trained = []
        for name in group:
            batch = pack_samples([dummy_sample(name, adapter, torch.float64)], adapter=adapter)
            trained.append(set(gradients(prepared, [prepared(**batch.forward_kwargs(prepared)).logits[0]])))
        assert all(names == trained[0] for names in trained) and any("vis" in name for name in trained[0])


def test_a_planted_leak_is_seen(pair, monkeypatch):
    """Boundaries of the whole row instead of each segment, in the attention or in the recurrent layers, change the logits."""
    family, _, prepared = pair
    adapter = adapter_for(prepared.config)
    raws = samples_for(adapter)
    batch = pack_samples(raws, adapter=adapter)
    arguments = batch.forward_kwargs(prepared)
    with torch.no_grad():
        want = prepared(**arguments).logits
        whole = arguments | {"cu_seq_lens_q": torch.tensor([0, batch.total_tokens], dtype=torch.int32)}
        assert float((prepared(**whole).logits - want).abs().max()) > 1e-3
        if family.startswith("qwen3_5"):
            layer = prepared.model.language_model.layers[0].linear_attn
            hidden = torch.randn(1, batch.total_tokens, 32, dtype=torch.float64)
            leak = layer(hidden) - layer(hidden, cu_seq_lens_q=arguments["cu_seq_lens_q"])
            first = int(batch.cu_seqlens_q[1])
            assert float(leak[:, :first].abs().max()) < 1e-6 and float(leak[:, first:].abs().max()) > 1e-3


def test_spelled_media_token_keeps_its_own_embedding(pair):
    """M2: a text that spells the image token, beside a real image. Stock models go by ids alone and are refused."""
    family, stock, prepared = pair
    adapter = adapter_for(stock.config)
    rng = np.random.default_rng(3)
    image, start, end = adapter.media_tokens["image"], adapter.vision_start, adapter.vision_end
    spelled = {"input_ids": torch.tensor([5, image, image, 6, 7])}
    real = {
        "input_ids": torch.tensor([9, start, image, end, 8]),
        "mm_token_type_ids": torch.tensor([0, 0, 1, 0, 0]),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values": torch.from_numpy(rng.standard_normal((4, *adapter.fields["pixel_values"].shape))),
    }
    if "moe_mm_token_type_ids" in adapter.fields:
        spelled["moe_mm_token_type_ids"] = torch.zeros(5, dtype=torch.int64)
        real["moe_mm_token_type_ids"] = torch.tensor([0, 1, 1, 1, 0])
    batch = pack_samples([spelled, real], adapter=adapter)
    assert batch.media_token_validity_mask[0].tolist() == [False] * 7 + [True] + [False] * 2
    with pytest.raises((SpelledMediaTokenError, ValueError), match=r"spells a media token|ignores segment"):
        batch.forward_kwargs(stock)
    got = prepared(**batch.forward_kwargs(prepared)).logits[0]
    ids = spelled["input_ids"][None]
    text_only = stock.model.language_model(inputs_embeds=stock.get_input_embeddings()(ids), use_cache=False)
    want = [stock.lm_head(text_only.last_hidden_state)[0], alone(stock, real)]
    assert largest(want, [got[:5], got[5:]]) <= (1e-5 if family in FP32_LOGITS else 1e-12)


def test_glm_images_and_videos_in_one_row():
    """GLM-4V writes the image token inside videos too, so a stock model refuses a row of both; a prepared one runs it."""
    stock, prepared = tiny.tiny_model("glm4v"), prepare_model(tiny.tiny_model("glm4v"))
    adapter = adapter_for(stock.config)
    raws = samples_for(adapter, seed=1, media=(1,) * 8)
    assert {"image_grid_thw", "video_grid_thw"} <= set().union(*raws)
    assert largest([alone(stock, raw) for raw in raws], packed(prepared, raws, adapter)) <= 1e-12


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    import torch.distributed as dist

    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointing(model):
    model.train().gradient_checkpointing_enable()
    return model


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("wrap", [ddp, fsdp2, checkpointing])
def test_wrapped_models_compute_the_same(one_rank, family, wrap):
    plain, wrapped = prepare_model(tiny.tiny_model(family)), wrap(prepare_model(tiny.tiny_model(family)))
    adapter = adapter_for(plain.config)
    raws = samples_for(adapter, media=(1, 2))
    expected = gradients(plain, packed(plain, raws, adapter))
    actual = {name.removeprefix("module."): g for name, g in gradients(wrapped, packed(wrapped, raws, adapter)).items()}
    full = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in actual.items()}
    assert full.keys() == expected.keys()
    assert largest(list(full.values()), list(expected.values())) == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni"])
def test_what_reaches_flash_attention(family):
    """On a GPU, flash attention gets the pack's boundaries in the decoder and the towers' own in the towers.

    A stand-in with flash attention's arguments takes its place here: models call it the way they call flash attention.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    calls: list[tuple[str, Any]] = []

    def stand_in(module, query, key, value, attention_mask=None, **arguments):
        assert attention_mask is None and arguments["cu_seq_lens_k"] is arguments["cu_seq_lens_q"]
        assert isinstance(arguments["max_length_q"], int) and arguments["cu_seq_lens_q"].dtype == torch.int32
        calls.append((type(module).__name__, arguments["cu_seq_lens_q"].tolist()))
        return varlen_attention(module, query, key, value, None, **arguments)

    AttentionInterface.register("flash_stand_in", stand_in)
    ALL_MASK_ATTENTION_FUNCTIONS.register("flash_stand_in", padding_only_mask)
    stock, prepared = tiny.tiny_model(family), prepare_model(tiny.tiny_model(family))
    for config in {id(m.config): m.config for m in prepared.modules() if hasattr(m, "config")}.values():
        config._attn_implementation_internal = "flash_stand_in"  # set_attn_implementation asks for the real package
    adapter = adapter_for(stock.config)
    raws = samples_for(adapter)
    assert largest([alone(stock, raw) for raw in raws], packed(prepared, raws, adapter)) <= 1e-12
    cu = pack_samples(raws, adapter=adapter).cu_seqlens_q_padded.tolist()
    decoder = {tuple(seen) for name, seen in calls if not ("Vision" in name or "Audio" in name)}
    towers = {tuple(seen) for name, seen in calls if "Vision" in name or "Audio" in name}
    assert decoder == {tuple(cu)} and towers and tuple(cu) not in towers


def test_dummies_reach_every_tower_and_teach_nothing(pair):
    """A text packed with dummies of every modality: its gradients stay, and each tower's are zero, not missing."""
    _, _, prepared = pair
    adapter = adapter_for(prepared.config)
    text = next(raw for raw in samples_for(adapter) if not media_grids(raw, adapter))
    dummies = [dummy_sample(name, adapter, torch.float64) for name in adapter.dummy_grids]
    length = len(text["input_ids"])

    def text_gradients(samples, **settings):
        prepared.zero_grad()
        batch = pack_samples(samples, adapter=adapter, **settings)
        logits = prepared(**batch.forward_kwargs(prepared)).logits[0]
        assert bool(torch.isfinite(logits).all())
        weights = torch.zeros_like(logits)
        weights[:length] = torch.linspace(-1, 1, logits[:length].numel(), dtype=logits.dtype).view(length, -1)
        (logits * weights).sum().backward()
        return {name: p.grad.clone() for name, p in prepared.named_parameters() if p.grad is not None}

    alone_, with_dummies = text_gradients([text]), text_gradients([text, *dummies], num_dummies=len(dummies))
    added = with_dummies.keys() - alone_.keys()
    real = [sample for sample in samples_for(adapter) if media_grids(sample, adapter)]
    if adapter.shares_token:
        real = [sample for sample in real if not {"image_grid_thw", "video_grid_thw"} <= set(sample)]
    trained = gradients(prepared, packed(prepared, real, adapter)).keys()
    assert added and trained == with_dummies.keys(), "DDP waits for every parameter that real media reach"
    assert all(float(with_dummies[name].abs().max()) == 0 for name in added)
    scale = max(float(g.abs().max()) for g in alone_.values())
    assert largest(list(alone_.values()), [with_dummies[name] for name in alone_]) / scale <= 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dummies_have_no_row_of_zeros(family):
    """SmolVLM and its kin take such rows for padding and leave them out."""
    adapter = adapter_for(family)
    for name in adapter.dummy_grids:
        for value in dummy_sample(name, adapter, torch.bfloat16).values.values():
            assert not value.is_floating_point() or value.dtype == torch.float32 or bool((value != 0).all())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_a_prepared_model_generates_as_before(family):
    """Evaluation between steps: prefill and decoding with a cache, image included."""
    stock, prepared = tiny.tiny_model(family), prepare_model(tiny.tiny_model(family))
    raw = samples_for(adapter_for(stock.config), media=(2,))[0]
    given = {name: value[None] if name.endswith("_ids") else value for name, value in raw.items()}
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(given["input_ids"])
    want, got = (model.generate(**given, attention_mask=mask, **settings) for model in (stock, prepared))
    assert torch.equal(want, got)
