"""Real processors of families with ordinary positions, tiny and offline, each beside the config of a model that fits it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evenpack.collate.encoding.processors import put_together

from .tiny import FAMILIES, PINPOINTS, Settings, model_class

#: ChatML; `IMAGE` stands for what a user of the family writes where an image goes.
TEMPLATE = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- for p in m.content %}{% if p.type == 'image' %}{{ 'IMAGE' }}{% elif p.type == 'video' %}{{ 'VIDEO' }}
{%- else %}{{ p.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""
#: Side of a tile in pixels: what the tiny towers see.
SIDE = 16
SIZE = {"height": SIDE, "width": SIDE}
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image>", "<video>")


def words(*more: str, image: str = "<image>", video: str = "<video>", **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few merges, with control tokens.

    Args:
        *more: further control tokens.
        image: what the chat template writes for an image.
        video: what it writes for a video.
        **special: control tokens by the names under which processors look them up.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a"), ("\u010a\u010a", "\u010a"), (">", "\u010a"), ("t", "h"), ("th", "e")]
    vocabulary = alphabet + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE({piece: at for at, piece in enumerate(vocabulary)}, merges))
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = dict.fromkeys(("<bos>", *CONTROL, image, video, *more, *special.values()))
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, extra_special_tokens=special, bos_token="<bos>",
        eos_token="<|im_end|>", pad_token="<|endoftext|>",
    )  # fmt: skip
    found.chat_template = TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)
    return found


def light(name: str, image_processor: Any, tokenizer: Any, **settings: Any) -> Any:
    """Return a processor without a video processor, for which transformers needs torchvision."""
    return put_together(getattr(transformers, name), image_processor, tokenizer, settings)


def with_videos(family: str) -> Any:
    """Return a processor with its video processor, for which transformers needs torchvision; frames are rows like images."""
    light_one = PROCESSORS[family][0]()
    if family == "internvl":
        videos = transformers.InternVLVideoProcessor(size=SIZE)
        return transformers.InternVLProcessor(
            transformers.GotOcr2ImageProcessor(size=SIZE, max_patches=4), light_one.tokenizer, videos, image_seq_length=4,
            chat_template=light_one.chat_template,
        )  # fmt: skip
    sampling = {"max_frames": 12, "fps": 1, "video_size": {"longest_edge": 32}}
    longest = {"longest_edge": SIDE}
    videos = transformers.SmolVLMVideoProcessor(size={"longest_edge": 32}, max_image_size=longest, video_sampling=sampling)
    return transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size=longest), light_one.tokenizer, videos,
        image_seq_len=4, chat_template=light_one.chat_template,
    )  # fmt: skip


def images(name: str, **settings: Any) -> Any:
    """Return an image processor of Pillow."""
    return getattr(transformers, f"{name}ImageProcessorPil")(**settings)


def _llava() -> Any:
    made = images("Llava", size={"shortest_edge": SIDE}, crop_size=SIZE)
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return light("LlavaProcessor", made, words(), patch_size=4, **strategy)


def _pixtral(patch: int, merge: int, name: str = "PixtralProcessor") -> Any:
    cell = patch * merge
    made = images("Pixtral", size={"longest_edge": 48}, patch_size={"height": cell, "width": cell})
    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    return light(name, made, words(image="[IMG]", **tokens), patch_size=patch, spatial_merge_size=merge)


def _anyres(name: str, **settings: Any) -> Any:
    family = "LlavaOnevision" if "Onevision" in name else "LlavaNext"
    size = SIZE if "Onevision" in name else {"shortest_edge": SIDE}
    crop = {} if "Onevision" in name else {"crop_size": SIZE}
    return light(name, images(family, size=size, image_grid_pinpoints=PINPOINTS, **crop), words(), **settings)


_CLASS_TOKEN = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def _internvl() -> Any:
    made = images("GotOcr2", size=SIZE, max_patches=4)
    return light("InternVLProcessor", made, words(image="<IMG_CONTEXT>", **_INTERN), image_seq_length=4)


def _qianfan() -> Any:
    made = images("GotOcr2", size=SIZE, max_patches=4)
    return light("QianfanOCRProcessor", made, words(**_INTERN), image_seq_length=4)


def _idefics(name: str) -> Any:
    made = images(name, size={"longest_edge": 32}, max_image_size={"longest_edge": SIDE})
    more = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokens = words("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *more)
    return light(f"{name}Processor", made, tokens, image_seq_len=4)


def _idefics2() -> Any:
    made = images("Idefics2", size={"shortest_edge": 8, "longest_edge": SIDE}, do_image_splitting=False)
    return light("Idefics2Processor", made, words("<fake_token_around_image>", "<end_of_utterance>"), image_seq_len=3)


def _aya() -> Any:
    made = images("GotOcr2", size=SIZE, crop_to_patches=True, max_patches=4)
    more = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"]
    more += [f"TILE_{at}" for at in range(5)]
    return light("AyaVisionProcessor", made, words(*more), patch_size=4, img_size=SIDE, downsample_factor=2)


def _deepseek(name: str, **size: Any) -> Any:
    return light(f"{name}Processor", images(name, size=SIZE, min_size=4, **size), _with_image(), num_image_tokens=16)


def _with_image(**special: str) -> Any:
    return words(image_token="<image>", **special)


def _janus() -> Any:
    made = images("Janus", size=SIZE, min_size=4)
    return light("JanusProcessor", made, _with_image(boi_token="<boi>", eoi_token="<eoi>"), num_image_tokens=16)


_OVIS = [f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")]


def _ovis2() -> Any:
    made = images("Ovis2", size=SIZE, crop_to_patches=True, max_patches=4)
    return light("Ovis2Processor", made, words("<IMG_ATOM>", *_OVIS), image_seq_length=16)


def _aria() -> Any:
    made = images("Aria", max_image_size=980, min_image_size=336)
    return light("AriaProcessor", made, _with_image(), size_conversion={490: 4, 980: 4})


def _gemma3() -> Any:
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    made = images("Gemma3", size=SIZE)
    return light("Gemma3Processor", made, words(image="<start_of_image>", **tokens), image_seq_length=4)


def _paligemma() -> Any:
    made = images("Siglip", size=SIZE)
    made.image_seq_length = 16
    return light("PaliGemmaProcessor", made, words())


def _grid(name: str, made: str = "Qwen2VL", patch: int = 4, **settings: Any) -> Any:
    size = {"shortest_edge": 16 * patch**2, "longest_edge": 128 * patch**2}
    tokens = words(image="<|image_pad|>", video="<|video_pad|>", image_token="<|image_pad|>", video_token="<|video_pad|>")
    return light(name, images(made, patch_size=patch, merge_size=2, size=size, **settings), tokens)


def _chameleon() -> Any:
    made = images("Chameleon", size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    tokens = words(image_token="<image>", boi_token="<racm3:break>", eoi_token="<eoss>")
    return light("ChameleonProcessor", made, tokens, image_seq_length=16)


def _cohere2() -> Any:
    tokens = {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}
    made = transformers.Cohere2VisionImageProcessor(size=SIZE, patch_size=2, max_patches=4)
    return light("Cohere2VisionProcessor", made, words(image="<|IMG_PATCH|>", image_token="<|IMG_PATCH|>", **tokens))


def _lfm2() -> Any:
    made = transformers.Lfm2VlImageProcessor(
        encoder_patch_size=4, tile_size=16, min_image_tokens=2, max_image_tokens=8, min_tiles=2, max_tiles=4,
        size={"height": 16, "width": 16},
    )  # fmt: skip
    more = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    return light("Lfm2VlProcessor", made, words("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *more))


def _kimi() -> Any:
    made = transformers.Kimi_K25ImageProcessor(patch_size=4, merge_size=2, size={"max_height": 64, "max_width": 64})
    tokens = words(image="<|media_pad|>", image_token="<|media_pad|>", video_token="<video>")
    return light("Kimi_K25Processor", made, tokens)


def _minimax() -> Any:
    size = {"shortest_edge": 4 * 8 * 8, "longest_edge": 48 * 8 * 8}
    made = transformers.MiniMaxM3VLImageProcessor(patch_size=4, merge_size=2, size=size)
    return light("MiniMaxM3VLProcessor", made, words(image="]<]image[>[", video="]<]video[>["))


def _gemma4() -> Any:
    tokens = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    tokens |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    made = images("Gemma4", patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    return light("Gemma4Processor", made, words(image="<|image|>", video="<|video|>", **tokens))


def _minicpm() -> Any:
    tokens = {
        "image_token": "<|image_pad|>", "video_token": "<video>", "image_start_token": "<image>", "image_end_token": "</image>",
        "slice_start_token": "<slice>", "slice_end_token": "</slice>", "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }  # fmt: skip
    made = images("MiniCPMV4_6", patch_size=4, scale_resolution=32, max_slice_nums=4)
    found = words(image="<|image_pad|>", **tokens)
    videos = transformers.MiniCPMV4_6VideoProcessor()
    return transformers.MiniCPMV4_6Processor(made, videos, found, chat_template=found.chat_template)


#: A real processor for a family, with the name of the token that anchors one feature.
PROCESSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "llava": (_llava, "<image>"),
    "vipllava": (_llava, "<image>"),
    "lighton_ocr": (lambda: _pixtral(4, 2, "LightOnOcrProcessor"), "[IMG]"),
    "llava_next": (lambda: _anyres("LlavaNextProcessor", **_CLASS_TOKEN), "<image>"),
    "llava_next_video": (lambda: _anyres("LlavaNextVideoProcessor", **_CLASS_TOKEN), "<image>"),
    "llava_onevision": (
        lambda: _anyres(
            "LlavaOnevisionProcessor",
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_2",
        ),
        "<image>",
    ),
    "granite4_vision": (lambda: _anyres("Granite4VisionProcessor", **_CLASS_TOKEN, downsample_rate="2/4"), "<image>"),
    "internvl": (_internvl, "<IMG_CONTEXT>"),
    "qianfan_ocr": (_qianfan, "<IMG_CONTEXT>"),
    "smolvlm": (lambda: _idefics("SmolVLM"), "<image>"),
    "idefics3": (lambda: _idefics("Idefics3"), "<image>"),
    "idefics2": (_idefics2, "<image>"),
    "aya_vision": (_aya, "<|IMG_PATCH|>"),
    "deepseek_vl": (lambda: _deepseek("DeepseekVL"), "<image>"),
    "deepseek_vl_hybrid": (lambda: _deepseek("DeepseekVLHybrid", high_res_size={"height": 32, "width": 32}), "<image>"),
    "janus": (_janus, "<image>"),
    "ovis2": (_ovis2, "<IMG_ATOM>"),
    "aria": (_aria, "<image>"),
    "gemma3": (_gemma3, "<image_soft_token>"),
    "gemma4": (_gemma4, "<|image|>"),
    "gemma4 (image blocks)": (_gemma4, "<|image|>"),
    "paligemma": (_paligemma, "<image>"),
    "exaone4_5": (lambda: _grid("Exaone4_5_Processor"), "<|image_pad|>"),
    "hyperclovax_vision_v2": (lambda: _grid("HyperCLOVAXVisionV2Processor"), "<|image_pad|>"),
    "video_llama_3": (lambda: _grid("VideoLlama3Processor", "VideoLlama3"), "<|image_pad|>"),
    "chameleon": (_chameleon, "<image>"),
}
#: The same, of processors that transformers opens beside torchvision alone.
BESIDE_TORCHVISION: dict[str, tuple[Callable[[], Any], str]] = {
    "llava (Pixtral)": (lambda: _pixtral(4, 1), "[IMG]"),
    "mistral3": (lambda: _pixtral(4, 2), "[IMG]"),
    "cohere2_vision": (_cohere2, "<|IMG_PATCH|>"),
    "lfm2_vl": (_lfm2, "<image>"),
    "kimi_k25": (_kimi, "<|media_pad|>"),
    "minicpmv4_6": (_minicpm, "<|image_pad|>"),
    "minimax_m3_vl": (_minimax, "]<]image[>["),
}


def fitting_config(family: str, processor: Any) -> Any:
    """Return the config of a family's tiny model, with the tokens of a processor."""
    ids = processor.tokenizer.convert_tokens_to_ids
    settings: Settings = copy.deepcopy(FAMILIES[family][1])
    text = settings.get("text_config", settings)
    text["vocab_size"] = len(processor.tokenizer)
    text["pad_token_id"] = processor.tokenizer.pad_token_id
    name = next((key for key in settings if key in ("image_token_id", "image_token_index")), None)
    anchor = ids({**PROCESSORS, **BESIDE_TORCHVISION}[family][1])
    if name is not None:
        settings[name] = anchor
    for key in ("video_token_id", "video_token_index"):
        if key in settings:
            settings[key] = ids("<video>")
    if "visual_indicator_token_ids" in settings:
        settings["vocab_size"] = len(processor.tokenizer)
        settings["visual_indicator_token_ids"] = ids(_OVIS)
    if family == "aria":  # its image processor knows rows of 490 and 980 pixels only
        settings["vision_config"] |= {"image_size": 980, "patch_size": 140}
        settings["projector_patch_to_query_dict"] = {49: 4}
    if "vocabulary_map" in settings:
        settings["vocabulary_map"] = {"<image>": anchor, **{f"IMGIMG{chr(65 + k)}Z": 50 + k for k in range(8)}}
    return model_class(family).config_class(**settings)


def fitting_model(family: str, processor: Any, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a random model of a family in evaluation mode, which understands the tokens of a processor."""
    torch.manual_seed(seed)
    model = model_class(family)(fitting_config(family, processor)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim < 2 else 0.05))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    return model
