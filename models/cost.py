"""Work of a training step per token, per token squared and per patch, read off a model's configuration.

All figures are floating-point operations of forward and backward. A matrix of P weights costs 2 P per token forward and
2 P for each of the two gradients (of activations, of weights). Causal attention over l tokens with h heads of size d costs
2 h d l^2 per layer forward, full attention 4 h d n^2; both cost twice that backward. A frozen tower that nothing trainable
feeds runs forward only; frozen weights that a gradient passes through save the gradient of weights.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 1, 1, 1
_TRAINED = FORWARD + INPUT_GRADIENT + WEIGHT_GRADIENT


class CostCoefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Operations per GPU of one training step.

    Attributes:
        decoder_linear: per token.
        decoder_quadratic: per token squared, of layers with full attention.
        decoder_windowed: per token squared, of layers with sliding-window attention, up to the window.
        decoder_window: window of those layers in tokens, 0 without.
        vision_linear: per patch of a frame.
        vision_quadratic: per patch squared of a frame.
        audio_linear: per mel frame of a clip; its attention looks through windows, so it is linear too.
        has_vision: the model has a tower for media, so that every sample has a cost in its phase, if 0.
    """

    decoder_linear: float
    decoder_quadratic: float
    decoder_windowed: float = 0.0
    decoder_window: int = 0
    vision_linear: float = 0.0
    vision_quadratic: float = 0.0
    audio_linear: float = 0.0
    has_vision: bool = False


def coefficients_from_config(
    hf_config: Any,
    *,
    trained_modalities: Sequence[str] | None = None,
    lora: bool = False,
    tp_size: int = 1,
    cp_size: int = 1,
) -> CostCoefficients:
    """Read the coefficients off a Hugging Face configuration, and off the model that it describes, rather than by its name.

    Args:
        hf_config: a text model's or a vision-language model's configuration.
        trained_modalities: media whose towers are trained; None: all; (): the tower is frozen.
        lora: the decoder's own weights are frozen and adapters train; their own work is left out.
        tp_size: tensor-parallel size: divides decoder and tower.
        cp_size: context-parallel size: divides the decoder; every rank of the group runs the whole tower.

    Returns:
        Operations per GPU.

    Raises:
        ValueError: a configuration without the sizes of a decoder, or sizes below 1.
    """
    try:
        return _coefficients(hf_config, trained_modalities, lora, tp_size, cp_size)
    except (
        AttributeError,
        TypeError,
        KeyError,
        IndexError,
        RuntimeError,
    ) as error:  # attributes of layers that are not known here
        raise ValueError(f"{type(hf_config).__name__}: cannot tell what a token costs ({error}). {_WITHOUT}") from error


def _coefficients(
    hf_config: Any, trained_modalities: Sequence[str] | None, lora: bool, tp_size: int, cp_size: int
) -> CostCoefficients:
    for name, size in (("tp_size", tp_size), ("cp_size", cp_size)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    holder = getattr(hf_config, "thinker_config", hf_config)
    text = getattr(holder, "text_config", None) or holder
    vision = getattr(holder, "vision_config", None)
    weights = 2.0 * (_TRAINED - WEIGHT_GRADIENT if lora else _TRAINED)
    full_width, window_width = _attention_widths(text)
    linear = _weights(text)
    share = 1.0 / (tp_size * cp_size)
    fields: dict[str, Any] = {
        "decoder_linear": weights * linear * share + 2.0 * _TRAINED * _recurrent_state(text) * share,
        "decoder_quadratic": 2.0 * _TRAINED * full_width * share,
        "decoder_windowed": 2.0 * _TRAINED * window_width * share,
        "decoder_window": int(getattr(text, "sliding_window", None) or 0) if window_width else 0,
    }
    if vision is not None:
        trained = trained_modalities is None or bool({"image", "video"} & set(trained_modalities))
        towers = [_vision(one) for one in (vision, getattr(holder, "high_res_vision_config", None)) if one is not None]
        patch, patch_squared = (sum(costs) for costs in zip(*towers, strict=True))
        passes = (_TRAINED if trained else FORWARD) / tp_size
        fields |= {"vision_linear": passes * patch, "vision_quadratic": passes * patch_squared, "has_vision": True}
    elif getattr(holder, "image_token_id", None) is not None:  # patches or codes enter the decoder without a tower (Fuyu)
        fields["has_vision"] = True
    audio = getattr(holder, "audio_config", None)
    if audio is not None:
        trained = trained_modalities is None or "audio" in trained_modalities
        fields |= {"audio_linear": (_TRAINED if trained else FORWARD) / tp_size * _audio(audio), "has_vision": True}
    return CostCoefficients(**fields)


_WITHOUT = "Leave cost out: the planner then takes that of a typical model"


def _get(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    if default is None:
        raise ValueError(f"{type(config).__name__} has none of {', '.join(names)}: cannot tell what a token costs. {_WITHOUT}")
    return default


def _heads(text: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, size of a head."""
    heads = _get(text, "num_attention_heads", "decoder_attention_heads")
    size = getattr(text, "head_dim", None) or _get(text, "hidden_size") // heads
    return heads, getattr(text, "num_key_value_heads", None) or heads, size


def _layer_types(text: Any) -> list[str]:
    types = getattr(text, "layer_types", None)
    return list(types) if types else ["full_attention"] * _layers(text)


def _layers(text: Any) -> int:
    return int(_get(text, "num_hidden_layers", "decoder_layers"))


#: Beginnings of the types of layers whose state does not grow with the length.
_RECURRENT = ("linear", "conv", "mamba", "recurrent")
#: Parts of names of weights that a text token does not meet: towers, attention to an encoder, heads for later tokens.
_NOT_TEXT = re.compile(r"vision|visual|image|audio|encoder_attn|crossattention|mtp")
_ROUTED = re.compile(r"(^|\.)(?!\w*shared)\w*experts\.(\d+\.)?")


def _attention_widths(text: Any) -> tuple[int, int]:
    """Summed widths of the layers with full and with windowed attention."""
    full, windowed = 0, 0
    for layer, kind in enumerate(_layer_types(text)):
        if kind.startswith(_RECURRENT):
            continue
        # Layers may differ in size (Gemma 4).
        heads, _, size = _heads(text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text)
        if kind in ("sliding_attention", "chunked_attention"):
            windowed += heads * size
        else:
            full += heads * size
    return full, windowed


def _weights(text: Any) -> float:
    """Weights that a token is multiplied with: of all layers, the experts that it visits, and the head.

    They are counted in the model that transformers builds of the configuration, without memory for its weights. Where it has
    no such model (or cannot build it so), they follow from the attributes that decoders of today share.
    """
    try:
        return _counted_weights(text)
    except Exception:  # whatever the code of a model raises
        return _described_weights(text)


def _counted_weights(text: Any) -> float:
    """Build the model on the meta device, and count its matrices; embedding tables are looked up, not multiplied."""
    import transformers

    is_decoder = type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = auto.from_config(copy.deepcopy(text), attn_implementation="eager")
    if not is_decoder and model.config.is_encoder_decoder:
        raise ValueError("an encoder beside the decoder")
    total = 0.0 if is_decoder else float(text.hidden_size * text.vocab_size)
    stacks = {name: part for name, part in model.named_modules() if name.endswith("layers") and isinstance(part, nn.ModuleList)}
    built = sum(map(len, stacks.values()))
    # A model that goes through its layers several times has fewer than it says.
    rounds = max(1, _layers(text) // built) if built else 1
    for path, part in model.named_modules():
        if isinstance(part, nn.Embedding) or "Embedding" in type(part).__name__ or _NOT_TEXT.search(path):
            continue
        for name, weight in part.named_parameters(recurse=False):
            if weight.ndim >= 2 and not name.endswith("bias"):
                in_stack = any(path.startswith(f"{stack}.") for stack in stacks)
                total += weight.numel() * _share_visited(text, model, f"{path}.{name}", weight) * (rounds if in_stack else 1)
    return total


def _share_visited(text: Any, model: nn.Module, name: str, weight: torch.Tensor) -> float:
    """Share of a weight that one token meets: of stacked or listed experts those that it visits, else all."""
    routed = _ROUTED.search(name)
    if routed and routed[2]:
        experts = sum(1 for _ in model.get_submodule(name[: routed.start(2) - 1]).children())
    elif weight.ndim == 3 and weight.shape[0] in {value for key, value in vars(text).items() if "experts" in key}:
        experts = weight.shape[0]
    else:
        return 1.0
    visited = _get(
        text, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "top_k_experts"
    )
    return float(visited[0] if isinstance(visited, list | tuple) else visited) / experts


def _described_weights(text: Any) -> float:
    """Weights that a token is multiplied with, by the attributes of the configuration."""
    weights, hidden = 0.0, _get(text, "hidden_size")
    for layer, kind in enumerate(_layer_types(text)):
        weights += _feed_forward(text, layer)
        if kind == "linear_attention":
            weights += _recurrent_weights(text)
            continue
        heads, groups, size = _heads(text)
        gate = heads * size if getattr(text, "attn_output_gate", False) or hasattr(text, "linear_num_value_heads") else 0
        weights += hidden * (2 * heads * size + 2 * groups * size + gate)
    return weights + float(hidden * _get(text, "vocab_size"))


def _recurrent_weights(text: Any) -> int:
    """Gated delta rule: queries, keys, values and gate in, values out."""
    if not hasattr(text, "linear_num_value_heads"):
        return 0
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    return int(text.hidden_size * (2 * keys + 3 * values + 2 * text.linear_num_value_heads))


def _recurrent_state(text: Any) -> float:
    """Multiply-adds per token on the state of linear-attention layers: decay, update, read."""
    layers = _layer_types(text).count("linear_attention")
    if not layers:
        return 0.0
    return float(3 * layers * text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim)


def _feed_forward(text: Any, layer: int) -> float:
    """Active weights of one layer's feed-forward part: gate, up and down of every expert that a token visits."""
    hidden = _get(text, "hidden_size")
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_k", None)
    if not chosen or _is_dense(text, layer):
        gated = _get(text, "intermediate_size", "moe_intermediate_size")
        return float(3 * hidden * (gated[layer] if isinstance(gated, list | tuple) else gated))
    width = _get(text, "moe_intermediate_size", "intermediate_size")
    width = width[0] if isinstance(width, list | tuple) else width  # text experts first, vision experts second
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared += width * (getattr(text, "n_shared_experts", None) or getattr(text, "moe_num_shared_experts", None) or 0)
    experts = _get(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
    return float(hidden * (3 * (chosen * width + shared) + experts))


def _is_dense(text: Any, layer: int) -> bool:
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds:
        return bool(kinds[layer] == "dense")
    if layer in (getattr(text, "mlp_only_layers", None) or ()):
        return True
    if layer < (getattr(text, "first_k_dense_replace", None) or 0):
        return True
    return bool((layer + 1) % (getattr(text, "decoder_sparse_step", None) or 1))


def _audio(audio: Any) -> float:
    """Forward operations per mel frame: convolutions, then layers that attend within windows."""
    width = _get(audio, "d_model", "hidden_size")
    mels = _get(audio, "num_mel_bins", "input_size", "input_feat_size", default=80)
    layers = _get(audio, "encoder_layers", "num_hidden_layers", "num_blocks", "conf_num_hidden_layers")
    inner = _get(audio, "encoder_ffn_dim", "intermediate_size", default=4 * width)
    channels = getattr(audio, "downsample_hidden_size", None)
    if channels:  # three convolutions of 3 x 3, each of which halves time and frequency
        positions = 1 / 8
        convolutions = sum(9 * channels * (channels if step else 1) * mels / 4 ** (step + 1) for step in range(3))
        convolutions += positions * (channels * mels // 8) * width
    else:  # two of width 3 along time, the second of which halves it
        positions = 1 / 2
        convolutions = 3 * mels * width + positions * 3 * width * width
    window = positions * (getattr(audio, "n_window_infer", None) or 2 * _get(audio, "n_window", default=750))
    per_position = layers * (4 * width * width + 2 * width * inner) + width * getattr(audio, "output_dim", width)
    return float(2.0 * (convolutions + positions * per_position) + 4.0 * positions * layers * width * window)


#: Words for the size of a vision transformer in the names of architectures (timm), to its width and its layers.
_TIMM_SIZES = {
    "tiny": (192, 12),
    "small": (384, 12),
    "base": (768, 12),
    "large": (1024, 24),
    "so400m": (1152, 27),
    "huge": (1280, 32),
    "giant": (1408, 40),
    "gigantic": (1664, 48),
}
#: Weights of a tower of convolutions whose name says nothing.
_TIMM_WEIGHTS = 300_000_000


def _vision(vision: Any) -> tuple[float, float]:
    """Forward operations per patch and per patch squared of one frame."""
    # DeepSeek-OCR 2 has two towers one after the other.
    parts = [getattr(vision, name) for name in ("sam_config", "encoder_config") if hasattr(vision, name)]
    if parts:
        towers = [_vision(part) for part in parts]
        return sum(linear for linear, _ in towers), sum(quadratic for _, quadratic in towers)
    if hasattr(vision, "architecture"):
        return _timm(vision)
    # Qwen2-VL calls the tower's width embed_dim and uses hidden_size for what it hands to the decoder.
    width = _get(vision, "embed_dim", "hidden_size")
    if "out_hidden_size" not in vars(vision) and "embed_dim" not in vars(vision):
        out = width
    else:
        out = getattr(vision, "out_hidden_size", None) or vision.hidden_size
    depth = _get(vision, "depth", "num_hidden_layers")
    inner = _mean(getattr(vision, "intermediate_size", None)) or int(width * _get(vision, "mlp_ratio", default=4))
    windowed = getattr(vision, "fullatt_block_indexes", None)
    # Towers with window attention gate their feed-forward part (three matrices).
    weights = depth * (4 * width * width + (3 if windowed is not None else 2) * width * inner)
    merge = getattr(vision, "spatial_merge_size", 1) ** 2
    weights += (merge * width) * (merge * width + out) / merge
    patch = _mean(getattr(vision, "patch_size", None)) or 14  # a tower behind another one has no patches of its own
    pixels = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1) * patch**2
    linear, full = 2.0 * (weights + width * pixels), depth
    if windowed is not None:
        full = len(windowed)
        linear += 4.0 * (depth - full) * width * (vision.window_size // patch) ** 2
    return linear, 4.0 * full * width


def _mean(value: Any) -> Any:
    """Return a size that some configurations give per side or per layer as one number."""
    return sum(value) / len(value) if isinstance(value, list | tuple) else value


def _timm(vision: Any) -> tuple[float, float]:
    """Forward operations of a tower of timm, whose configuration has a name and perhaps arguments, but no sizes.

    A vision transformer is told by its arguments or by the words of its name. Of convolutions only the weights are counted,
    by their number in the name where it is there (mobilenetv5_300m): a lower bound, because early layers run at more places.
    """
    words, given = vision.architecture.split("_"), vision.model_args or {}
    width, depth = next((_TIMM_SIZES[word] for word in words if word in _TIMM_SIZES), (0, 0))
    width, depth = given.get("embed_dim", width), given.get("depth", depth)
    if "vit" not in words or not (isinstance(width, int) and isinstance(depth, int) and width and depth):
        millions = [int(word[:-1]) for word in words if word[-1:] == "m" and word[:-1].isdigit()]
        return 2.0 * (millions[0] * 10**6 if millions else _TIMM_WEIGHTS), 0.0
    patch = next((int(word[5:]) for word in words if word.startswith("patch") and word[5:].isdigit()), 14)
    return 2.0 * (depth * 12 * width * width + width * 3 * patch**2), 4.0 * depth * width
