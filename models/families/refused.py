"""Families that packs cannot serve, each with its reason, so that a user reads that and not a list of other names."""

_CROSS = "images enter by cross attention, which a pack cannot keep apart"
_ENCODER = "an encoder reads the input, and its decoder attends to all of it: there is no row to pack"
_ALWAYS = "every call needs an image, so a text alone, or a rank without images, cannot run"
_OWN_MASK = "it builds attention masks of its own, which never see the boundaries of a pack"
_INDEXED = "an index picks the tokens that each token attends to from the whole row, other samples included"
_RECURRENT = "recurrent layers carry a state from sample to sample of a pack"

#: `config.model_type` to the reason.
REFUSED: dict[str, str] = {
    "mllama": _CROSS,
    "idefics": _CROSS,
    "florence2": _ENCODER,
    "t5gemma2": _ENCODER,
    "pix2struct": _ENCODER,
    "udop": _ENCODER,
    "kosmos-2.5": _OWN_MASK,
    "vision-encoder-decoder": _ENCODER,
    "speech-encoder-decoder": _ENCODER,
    "whisper": _ENCODER,
    "blip-2": _ALWAYS,
    "instructblip": _ALWAYS,
    "instructblipvideo": _ALWAYS,
    "git": _OWN_MASK,
    "pi0": _OWN_MASK,
    "diffusion_gemma": _OWN_MASK,
    "dots3_note": _INDEXED,
    "glm5_next": _INDEXED,
    "hy_v4_vl": _INDEXED,
    "mistral_large4": _INDEXED,
    "qwen4_exp": _INDEXED,
    "inkling_mm_model": _RECURRENT,
    "inkling2": _RECURRENT,
    "inkling2_loop": _RECURRENT,
    "nemotron_h_omni": _RECURRENT,
    "deepseek_ocr2": "its vision encoder attends to images in a pattern that packs do not keep",
    "granite_docling": "one flag per call says whether images are cut into tiles, so samples of both kinds cannot share a pack",
    "phi4_multimodal": "in transformers 5.24 an image comes out differently as soon as another one of the call is padded",
    "llama4": "in transformers 5.24 its forward pass raises AttributeError (image_outputs), packed or not",
}


def reason_against(model_type: str) -> str | None:
    """Return why packs cannot serve a family, None for one that is not in the table or was mended since."""
    if model_type == "llama4" and _llama4_is_mended():
        return None
    return REFUSED.get(model_type)


def _llama4_is_mended() -> bool:
    """Whether the output of Llama 4's language model has the attribute that its own forward pass reads."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    return hasattr(MoeCausalLMOutputWithPast, "image_outputs")
