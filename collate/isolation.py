"""See for oneself that a model keeps the samples of its processor apart: run them in a pack and alone, and compare."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..core import IGNORED, UnsafeModelError
from ..models.adapter import ModelAdapter
from ..models.setup import probe
from ..models.setup.prepare import attention_lists, decoder_of
from ..models.setup.unwrap import unwrap_model
from .encoding.checks import media_strings, placeholder
from .encoding.escaper import Shield
from .encoding.process import TextProcessor
from .encoding.sample import media_fields
from .encoding.settings import EncoderConfig
from .encoding.sizes import counts_pixels
from .packs.pack import pack_samples
from .samples.group import fold_group
from .samples.prepare import prepare_sample

#: Multiple that samples of the pack are padded to, so that padding is seen too.
_ALIGN = 4
#: Sizes (height, width) of the images of each sample that a processor makes; of many shapes, so that no two mix unseen.
_IMAGES: dict[str, tuple[tuple[int, int], ...]] = {
    "a text": (),
    "one image": ((90, 150),),
    "two images": ((120, 70), (60, 64)),
    "another image": ((64, 64),),
}
#: Tokens at the end of each sample that train.
_TRAINED = 3


@torch.no_grad()
def verify_isolation(
    model: nn.Module,
    adapter: ModelAdapter,
    *,
    processor: Any = None,
    lengths: tuple[int, int] | None = None,
    groups: bool = False,
) -> float:
    """Run samples in a pack, with padding behind each, and alone, and compare what the decoder makes of them.

    `check_model` goes by what it knows about layers; this goes by what the model does, and so finds what is new. It needs a
    transformers model that is ready to run. Two texts are always tried. With a processor, it makes samples without and with
    images, and each of them is compared with the stock model: with the attention of transformers, called as anyone would call
    it, with what the processor returns. That shows a change of meaning too, not only a leak: masks that got lost, features at
    the wrong place or of another sample. The model runs once per sample, and once with the pack (on every rank, where it is
    sharded).

    Args:
        model: the model, wrapped or not, set up by `prepare_model`.
        adapter: its family.
        processor: the family's processor, of transformers; None to try texts alone.
        lengths: tokens of the two texts; default: 9 and 7, or a first text long enough for the rotary tables of long samples
            where the model has such.
        groups: whether to try a group too, of texts that share a prefix: branches must see it, and not each other.

    Returns:
        The largest difference of an output, relative to the largest one: rounding, if anything.

    Raises:
        UnsafeModelError: a sample's outputs depend on the pack around it, or differ from those of the stock model; the sample
            is named, and the layer where it begins.
        SampleError: a sample that the processor makes and the adapter refuses.
        ValueError: a processor that makes no images, for a family that has them.
    """
    changes = [probe.verify_isolation(model, adapter, lengths=lengths)]
    was_training = model.training
    model.eval()
    try:
        if groups:
            changes.append(_compare_members(model, adapter))
        if processor is not None:
            changes.append(_compare_samples(model, adapter, processor))
    finally:
        model.train(was_training)
    return max(changes)


def _compare_members(model: nn.Module, adapter: ModelAdapter) -> float:
    """Return how much the outputs of texts with a common prefix change where they are packed as a group."""
    inner, device = unwrap_model(model), next(model.parameters()).device
    prompt, largest = [1, 2, 3, 4, 5, 6, 7], 0.0
    texts = [[*prompt, *[8 + number] * (3 + number)] for number in range(3)]
    raws = [{"input_ids": ids, "labels": [*[IGNORED] * len(prompt), *ids[len(prompt) :]]} for ids in texts]
    group = fold_group([prepare_sample(raw, adapter=adapter) for raw in raws], adapter)
    batch = pack_samples([group], adapter=adapter, align=_ALIGN).to(device)
    packed = batch.unpack(_run(model, inner, batch.forward_kwargs(model)), axis=0)
    for number, (raw, got) in enumerate(zip(raws, packed, strict=True)):
        alone = pack_samples([raw], adapter=adapter).to(device)
        want = _run(model, inner, alone.forward_kwargs(model))
        change = _change(got, want)
        if not change <= _tolerance(want):
            raise UnsafeModelError(
                f"{type(inner).__name__}: member {number} of a group that shares a prefix differs by {change:.2g} of the "
                "largest output from the same sample alone: branches see each other, or do not see their prefix"
            )
        largest = max(largest, change)
    return largest


def _change(packed: torch.Tensor, alone: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((packed - alone).abs().max() / alone.abs().max())


def _tolerance(outputs: torch.Tensor) -> float:
    return probe.ROUNDING.get(outputs.dtype, 1e-4)


class _Probe(NamedTuple):
    """A sample for a pack, and the arguments that the stock model takes for it alone."""

    sample: Mapping[str, Any]
    arguments: Mapping[str, Any]


def _compare_samples(model: nn.Module, adapter: ModelAdapter, processor: Any) -> float:
    """Return how much the outputs of samples that a processor makes change in a pack, against the stock model."""
    inner: Any = unwrap_model(model)
    probes = _made_by(processor, adapter, inner)
    batch = pack_samples([one.sample for one in probes], adapter=adapter, align=_ALIGN).to(next(model.parameters()).device)
    packed = batch.forward_kwargs(model)
    at_end = batch.unpack(_run(model, inner, packed), axis=0)
    starts = batch.cu_seqlens_q_padded.tolist()
    largest = 0.0
    for number, (one, got, start) in enumerate(zip(probes, at_end, starts, strict=False)):
        with _stock_attention(inner):
            want = _run(model, inner, one.arguments)
        change = _change(got, want)
        if not change <= _tolerance(want):
            where = _first_difference(model, inner, packed, one.arguments, start)
            raise UnsafeModelError(
                f"{type(inner).__name__}: in a pack, the sample with {one.sample['sample_id']} (number {number}) differs by "
                f"{change:.2g} of the largest output from the stock model on it alone, from {where} on"
            )
        largest = max(largest, change)
    return largest


def _made_by(processor: Any, adapter: ModelAdapter, inner: Any) -> list[_Probe]:
    """Return samples that a processor makes; those with images only for a family that has some."""
    token = placeholder(processor, "image")
    has_images = "image" in adapter.media_tokens
    if has_images and (getattr(processor, "image_processor", None) is None or token is None):
        kind = type(processor).__name__
        raise ValueError(f"{kind} makes no images, and {adapter.name} has them: give the family's processor")
    tokenizer = getattr(processor, "tokenizer", processor)
    before, after = ("".join(tokenizer.convert_ids_to_tokens(ids)) for ids in adapter.brackets("image"))
    image = f"{before}{token}{after}"
    config = _config(processor) if has_images else EncoderConfig()
    process = TextProcessor(processor, adapter, config, Shield(media_strings(processor)))
    rng = np.random.default_rng(0)
    made: list[_Probe] = []
    for name, sizes in _IMAGES.items():
        if sizes and not has_images:
            continue
        pictures = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        text = f"Say what you see. {image * len(sizes)} A {name}, or none: nothing else is here."
        try:
            made.append(_made(text, pictures, process, adapter, inner, name))
        except ValueError:
            if sizes:
                raise  # only a text alone may be refused, as PaliGemma's processor does
    return made


def _config(processor: Any) -> EncoderConfig:
    """Return settings with the image processor's own limits of the area, where it has such."""
    image_processor = processor.image_processor
    if not counts_pixels(image_processor):
        return EncoderConfig()
    size = dict(image_processor.size)
    return EncoderConfig(min_pixels=int(size["shortest_edge"]), max_pixels=int(size["longest_edge"]))


def _made(
    text: str, pictures: list[np.ndarray], process: TextProcessor, adapter: ModelAdapter, inner: Any, name: str
) -> _Probe:
    """Return a sample as an encoder makes it, and what the processor returns for it to anyone who calls it."""
    from PIL import Image

    parameter = next(inner.parameters())
    media = {"image": [Image.fromarray(one) for one in pictures]} if pictures else {}
    made = process(text, media, f"the sample with {name}")
    ids = torch.from_numpy(made.ids)
    fields = {key: _cast(value, parameter.dtype) for key, value in media_fields(made, adapter).items()}
    trained = torch.arange(len(ids)) >= len(ids) - _TRAINED
    sample: dict[str, Any] = {
        "input_ids": ids,
        "labels": torch.where(trained, ids, IGNORED),
        "mm_token_type_ids": torch.from_numpy(made.types),
        "sample_id": name,
        **fields,
    }
    taken = inspect.signature(inner.forward).parameters
    given = process.as_called(text, media, types="mm_token_type_ids" in taken)
    arguments = {key: _cast(value, parameter.dtype) for key, value in given.items() if key in taken and key != "labels"}
    if adapter.bidirectional == "prefix" and "token_type_ids" in taken:
        arguments["token_type_ids"] = trained.long()[None]
    tensors = {key: value.to(parameter.device) for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    return _Probe(sample, {**arguments, **tensors, "use_cache": False})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


@contextmanager
def _stock_attention(inner: Any) -> Iterator[None]:
    """Run a model with the attention of transformers, and after that with the one it had."""
    configs = {id(module.config): module.config for module in inner.modules() if hasattr(module, "config")}
    before = [(config, getattr(config, "_attn_implementation_internal", None)) for config in configs.values()]
    try:
        try:
            inner.set_attn_implementation("sdpa")
        except ValueError:  # a decoder that computes what sdpa cannot, such as capped scores
            inner.set_attn_implementation("eager")
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _run(model: nn.Module, inner: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return what comes out of the decoder, [T, D], of a row."""
    found: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output[0] if not isinstance(output, torch.Tensor) else output)

    handle = decoder_of(inner).register_forward_hook(keep)
    # No logits of the whole row: with a large vocabulary they need more memory than the model.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(inner.forward).parameters else {}
    try:
        model(**arguments, **fewer)
    finally:
        handle.remove()
    return found[-1][0]


def _first_difference(model: nn.Module, inner: Any, packed: Mapping[str, Any], alone: Mapping[str, Any], start: int) -> str:
    """Return where the hidden states of a sample, which starts in a row at `start`, begin to differ."""
    ours = _hidden_states(model, inner, packed)
    with _stock_attention(inner):
        stock = _hidden_states(model, inner, alone)
    for layer, (row, want) in enumerate(zip(ours, stock, strict=True)):
        if not _change(row[start : start + len(want)], want) <= _tolerance(want):
            return f"decoder layer {layer - 1}" if layer else "its embeddings (features of media, or where they lie)"
    return "the end of the decoder"


def _hidden_states(model: nn.Module, inner: Any, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return what goes into a decoder's first layer and what comes out of each, [T, D], on the host."""
    layers = [layer for layers in attention_lists(decoder_of(inner)) for layer in layers]
    found: list[torch.Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[0].cpu())

    def after(_: nn.Module, __: Any, output: Any) -> None:
        found.append((output if isinstance(output, torch.Tensor) else output[0])[0].cpu())

    handles = [layer.register_forward_hook(after) for layer in layers]
    handles.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
    try:
        _run(model, inner, arguments)
    finally:
        for handle in handles:
            handle.remove()
    return found
