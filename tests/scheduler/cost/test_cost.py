"""Costs are integers, read off configurations or fitted to measured times."""

import doctest
import importlib
import re

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch.utils.flop_counter import FlopCounterMode

from evenpack.models.cost import CostCoefficients, coefficients_from_config
from evenpack.scheduler.cost.model import CostModel, Observation, nonnegative_least_squares

transformers = pytest.importorskip("transformers")
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def config_of(name: str, **settings):
    if name == "qwen2_5_vl":  # the width of released towers; the class default is another
        settings.setdefault("vision_config", {"hidden_size": 1280})
    return transformers.CONFIG_MAPPING[name](**settings)


def test_a_7b_decoder_has_the_published_ratio():
    found = coefficients_from_config(config_of("qwen2", **QWEN_7B))
    head = 6 * 3584 * 152064
    assert (found.decoder_linear - head) / 3 == pytest.approx(13.05e9, rel=0.005)
    assert (found.decoder_linear - head) / found.decoder_quadratic == pytest.approx(65_000, rel=0.01)
    assert not found.has_vision


@pytest.mark.parametrize(
    ("name", "linear", "quadratic"),
    [("qwen2_5_vl", 1.26e9, 2.05e4), ("qwen3_vl", 0.82e9, 1.244e5), ("qwen2_vl", 1.26e9, 1.638e5)],
)
def test_towers_have_the_work_of_their_shapes(name, linear, quadratic):
    found = coefficients_from_config(config_of(name), trained_modalities=())
    assert found.vision_quadratic == pytest.approx(quadratic, rel=0.01)
    assert found.vision_linear == pytest.approx(linear, rel=0.05)
    trained = coefficients_from_config(config_of(name))
    assert trained.vision_linear == pytest.approx(3 * found.vision_linear)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
             "qwen3_5_moe", "glm4v", "glm4v_moe", "ernie4_5_vl_moe", "qwen3_omni_moe", "qwen3_next"]
)  # fmt: skip
def test_every_family_has_costs(name):
    model = CostModel.from_config(config_of(name))
    grids = [(2, 16, 16)] if len(model.phases) == 2 else []
    cost = model.sample_cost(1000, grids)
    assert len(cost) == len(model.phases) and min(cost) > 0
    assert all(isinstance(value, int) for value in cost)


@pytest.mark.parametrize(
    ("name", "active_billions"),
    [("qwen3_moe", {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                    "head_dim": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_local_experts": 128,
                    "vocab_size": 151936})],
)  # fmt: skip
def test_mixtures_count_the_experts_that_a_token_visits(name, active_billions):
    """Qwen3-30B-A3B: 3.3 billion active weights, 0.3 of them the input embedding, which is no matrix product."""
    found = coefficients_from_config(config_of(name, **active_billions))
    assert found.decoder_linear / 6 / 1e9 == pytest.approx(3.04, rel=0.02)


def test_linear_attention_layers_have_no_quadratic_part():
    config = config_of("qwen3_next")
    full = config.layer_types.count("full_attention")
    found = coefficients_from_config(config)
    assert 0 < full < config.num_hidden_layers
    assert found.decoder_quadratic == 6 * full * config.num_attention_heads * config.head_dim


def test_what_parallelism_and_lora_divide():
    config = config_of("qwen3_vl")
    plain = coefficients_from_config(config)
    split = coefficients_from_config(config, tp_size=2, cp_size=4)
    lora = coefficients_from_config(config, lora=True)
    assert split.decoder_linear == pytest.approx(plain.decoder_linear / 8)
    assert split.decoder_quadratic == pytest.approx(plain.decoder_quadratic / 8)
    assert split.vision_linear == pytest.approx(plain.vision_linear / 2)
    assert lora.decoder_linear == pytest.approx(plain.decoder_linear * 2 / 3)
    assert lora.decoder_quadratic == plain.decoder_quadratic
    with pytest.raises(ValueError, match="tp_size must be at least 1, got 0"):
        coefficients_from_config(config, tp_size=0)


def test_sliding_windows_stop_being_quadratic():
    model = CostModel.from_coefficients(
        CostCoefficients(decoder_linear=1024.0, decoder_quadratic=0.0, decoder_windowed=1.0, decoder_window=100)
    )
    assert model.sample_cost(100)[0] == 1024 * 100 + 100**2
    assert model.sample_cost(300)[0] - model.sample_cost(200)[0] == 1024 * 100 + 2 * 100 * 100


def test_video_frames_attend_inside_a_frame():
    model = CostModel.from_config(config_of("qwen3_vl"))
    one, eight = model.sample_cost(10, [(1, 16, 16)])[0], model.sample_cost(10, [(8, 16, 16)])[0]
    assert abs(eight - 8 * one) <= 8
    assert model.sample_cost(10, [(1, 32, 64)])[0] > eight
    assert model.sample_cost(10)[0] == 0


def test_many_samples_cost_what_each_costs():
    model = CostModel.from_config(config_of("qwen2_5_vl"))
    tokens, grids = [5, 70_000, 5, 1_000_000], [[(1, 4, 4)], [], [(2, 8, 8), (1, 4, 4)], []]
    expected = [model.sample_cost(*sample) for sample in zip(tokens, grids, strict=True)]
    assert model.sample_costs(tokens, grids).tolist() == [list(cost) for cost in expected]


def test_a_text_model_refuses_grids():
    with pytest.raises(ValueError, match="1 media items in a sample, and the model has no vision tower"):
        CostModel.from_config(config_of("llama")).sample_cost(10, [(1, 4, 4)])
    with pytest.raises(ValueError, match="has none of num_hidden_layers"):
        coefficients_from_config(object())


def observe(rng, noise: float) -> list[Observation]:
    out = []
    for _ in range(200):
        tokens = rng.integers(10, 4000, size=rng.integers(1, 20)).tolist()
        grids = [(1, int(h), 16) for h in rng.integers(8, 80, size=rng.integers(0, 4))]
        work = sum(n + n * n / 65536 for n in tokens) + 0.1 * sum(h * w + (h * w) ** 2 / 5000 for _, h, w in grids)
        out.append(Observation(tokens=tokens, grids=grids, seconds=(500 + work) * 1e-5 * rng.normal(1, noise)))
    return out


def test_fit_recovers_what_made_the_times():
    found = CostModel.fit(observe(np.random.default_rng(0), 0.0))
    model = found.model
    assert model.linear[1] / model.quadratic[1] == pytest.approx(65536, rel=1e-3)
    assert model.linear[0] / model.linear[1] == pytest.approx(0.1, rel=1e-3)
    assert found.microbatch_cost * model.unit == pytest.approx(500e-5, rel=1e-3)
    assert found.r_squared > 0.999999 and found.median_error < 1e-6


def test_fit_says_how_well_it_fits():
    found = CostModel.fit(observe(np.random.default_rng(0), 0.1))
    assert 0.03 < found.median_error < 0.12
    assert 0.5 < found.r_squared < 0.999
    assert min(*found.model.linear, *found.model.quadratic, found.microbatch_cost) >= 0
    with pytest.raises(ValueError, match="2 observations cannot fit 3 coefficients"):
        CostModel.fit([Observation(tokens=[1], seconds=1.0)] * 2)


def test_least_squares_equals_the_reference():
    rng = np.random.default_rng(1)
    for _ in range(50):
        matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
        assert np.allclose(nonnegative_least_squares(matrix, target), nnls(matrix, target)[0], atol=1e-9)
    column = rng.random(12)
    assert nonnegative_least_squares(np.stack([column] * 2, axis=1), 3 * column) == pytest.approx([3, 0])
    assert nonnegative_least_squares(-np.ones((4, 1)), np.ones(4)).tolist() == [0]


def test_docstring_example():
    module = importlib.import_module("evenpack.scheduler.cost.model")
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.full
def test_every_text_decoder_of_transformers_has_a_cost_or_is_told_what_to_do():
    """What is left without a cost keeps a state along the row, has no decoder of its own, or a tower of another kind."""
    without = []
    kinds = list(transformers.MODEL_FOR_CAUSAL_LM_MAPPING.keys())
    for kind in kinds:
        try:
            config = kind()
        except Exception:
            continue  # transformers cannot build it from its defaults
        try:
            assert coefficients_from_config(config).decoder_linear > 0
        except ValueError as error:
            assert "Leave cost out" in str(error), error
            without.append(kind.__name__.removesuffix("Config"))
    state = (
        "BailingHybrid|Bamba|GraniteMoeHybrid|Jamba|KimiLinear|.*Mamba.?|MiniMax|NemotronH|RecurrentGemma|Rwkv|Zamba.?|xLSTM"
    )
    other = "Blt|Dbrx|Dots3Note|Gemma3n|Musicgen.*|Phi4Multimodal|Reformer"
    assert [name for name in without if not re.fullmatch(f"{state}|{other}", name)] == [] and len(kinds) > 100


#: Sizes that most decoders understand; what a kind calls otherwise keeps its default.
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
DENSE = (
    "llama gpt2 opt gemma2 gemma3_text gpt_neox phi phi3 olmo2 starcoder2 cohere2 stablelm doge modernbert-decoder rembert "
    "hrm_text bloom mpt xglm nemotron bert-generation ernie smollm3 qwen3 glm4 biogpt exaone4 arcee apertus helium granite "
    "persimmon roberta electra openai-gpt ctrl gpt_bigcode seed_oss lfm2"
)
MIXTURES = (
    "qwen2_moe qwen3_moe mixtral gpt_oss olmoe glm4_moe phimoe ernie4_5_moe granitemoe hunyuan_v1_moe minimax_m2 flex_olmo"
)


@pytest.mark.parametrize("name", f"{DENSE} {MIXTURES}".split())
def test_costs_are_the_operations_of_the_model(name):
    """One token through all layers, as torch counts its matrix products; eager attention multiplies twice."""
    config = transformers.CONFIG_MAPPING[name](**TINY)
    config.is_decoder = True
    found = coefficients_from_config(config)
    more = {"experts_implementation": "eager"} if name in MIXTURES.split() else {}
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **more)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False)
    attention = 2 * (found.decoder_quadratic + found.decoder_windowed)  # causal: half of it is counted
    assert (found.decoder_linear + attention) / 3 == pytest.approx(counter.get_total_flops(), rel=1e-9)


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_audio_has_a_cost_of_its_own(name):
    config = transformers.AutoConfig.for_model(name)
    audio = getattr(config, "thinker_config", config).audio_config
    positions = 1 / 8 if name == "qwen3_omni_moe" else 1 / 2
    layers = audio.encoder_layers * (4 * audio.d_model**2 + 2 * audio.d_model * audio.encoder_ffn_dim)
    found = coefficients_from_config(config)
    assert 1.0 < found.audio_linear / (6 * positions * layers) < 1.6  # convolutions, windows and the projection on top
    assert coefficients_from_config(config, trained_modalities=("image",)).audio_linear == pytest.approx(found.audio_linear / 3)
    model = CostModel.from_config(config)
    clip, twice, image = (model.sample_cost(100, [grid]) for grid in ((1000, 1, 1), (2000, 1, 1), (1, 4, 4)))
    assert clip[0] > 0 and abs(twice[0] - 2 * clip[0]) <= 1 and clip[1] == image[1]
    assert clip[0] == pytest.approx(1000 * found.audio_linear / model.unit, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("internvl", None),  # sides of a patch as a list
        ("qianfan_ocr", None),
        ("deepseek_vl_hybrid", None),  # two towers side by side
        ("deepseek_ocr2", None),  # two towers one after the other
        ("gemma3n", 2.0 * 300e6),  # timm, convolutions: mobilenetv5_300m_enc
        ("fast_vlm", 2.0 * 300e6),  # timm, convolutions: fastvit_mci3
        ("perception_lm", 2.0 * 300e6),  # timm, by default a ResNet
        ("blip-2", None),
        ("phi4_multimodal", None),
        ("fuyu", 0.0),  # no tower at all
    ],
)
def test_towers_whose_configuration_looks_different(name, linear):
    found = coefficients_from_config(transformers.AutoConfig.for_model(name), trained_modalities=())
    assert found.has_vision and found.vision_linear == linear if linear is not None else found.vision_linear > 1e7
    assert CostModel.from_config(transformers.AutoConfig.for_model(name)).sample_cost(100, [(1, 4, 4)])


def test_sides_of_a_patch_may_be_a_list():
    one, two = (transformers.AutoConfig.for_model("internvl") for _ in range(2))
    two.vision_config.patch_size = one.vision_config.patch_size[0]
    assert coefficients_from_config(one) == coefficients_from_config(two)


def test_a_vision_transformer_of_timm_is_told_by_its_name():
    config = transformers.AutoConfig.for_model("perception_lm")
    config.vision_config.architecture = "vit_pe_core_large_patch14_336"
    found = coefficients_from_config(config, trained_modalities=())
    clip = coefficients_from_config(transformers.AutoConfig.for_model("llava"), trained_modalities=())  # ViT-L/14 as well
    assert found.vision_linear == pytest.approx(clip.vision_linear, rel=0.01)
    assert found.vision_quadratic == clip.vision_quadratic
