"""Real processors of families with ordinary positions: samples of `SampleEncoder` in a pack, against the stock model alone."""

import inspect

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.families.compare import WithoutCasts, gradients, largest
from benchmarks.families.processors import PROCESSORS, fitting_config, fitting_model
from evenpack.collate import SampleEncoder, load_processor, pack_samples
from evenpack.collate.encoding.checks import placeholder
from evenpack.collate.encoding.sizes import counts_pixels
from evenpack.collate.samples.prepare import item_grids
from evenpack.core import MediaMismatchError
from evenpack.models import adapter_for, prepare_model
from evenpack.models.layout.items import media_items
from evenpack.scheduler import OfflineConfig, OfflineIndex

ANSWER = "It is 42."
#: Sizes (height, width) of the images of each example.
SIZES = [(), ((40, 60),), ((30, 70), (64, 33))]


def encoder_of(processor, config):
    """Return an encoder; images keep the processor's own limits."""
    limits = {}
    if counts_pixels(processor.image_processor):
        size = dict(processor.image_processor.size)
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    return SampleEncoder(processor, adapter_for(config), **limits)


def example(rng, sizes, question="What is the answer?"):
    """Return a turn with images before the question, and its answer."""
    images = [Image.fromarray(rng.integers(1, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}], "images": images}


def called(processor, model, asked, sample):
    """Return what the stock model gets for an example alone: what its processor returns for the rendered text."""
    tokenizer = processor.tokenizer
    turns = [{"role": "user", "content": asked["messages"][0]["content"]}]
    turns += [{"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    taken = inspect.signature(model.forward).parameters
    given = {"images": [asked["images"]]} if asked["images"] else {}
    if "mm_token_type_ids" in taken:
        given["return_mm_token_type_ids"] = True
    out = processor(text=[text], return_tensors="pt", **given)
    assert torch.equal(out["input_ids"][0], sample["input_ids"]), "ids are the processor's"
    arguments = {name: double(value) for name, value in out.items() if name in taken and name != "labels"}
    if "token_type_ids" in arguments and model.config.model_type == "paligemma":  # the prefix ends where the answer begins
        first = int((sample["labels"] != -100).nonzero()[0])
        arguments["token_type_ids"] = (torch.arange(len(sample["input_ids"])) >= first).long()[None]
    return arguments


def double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("family", PROCESSORS)
def test_samples_of_its_processor_are_exact(family):
    check_exact(family, PROCESSORS[family][0]())


def check_exact(family, processor):
    """Logits and gradients of a pack equal those of the stock model on each sample alone."""
    stock, prepared = fitting_model(family, processor), fitting_model(family, processor)
    encoder = encoder_of(processor, stock.config)
    rng = np.random.default_rng(0)
    asked = [example(rng, sizes) for sizes in SIZES if sizes or family != "paligemma"]  # its processor takes no text alone
    samples = [encoder.encode(one) for one in asked]
    for sample in samples:
        assert processor.tokenizer.decode(sample["labels"][sample["labels"] != -100]) == f"{ANSWER}<|im_end|>"
    adapter = encoder.adapter
    pixels = {field.name for field in adapter.fields if adapter.is_pixels(field)}
    ready = [{name: double(value) if name in pixels else value for name, value in sample.items()} for sample in samples]
    batch = pack_samples(ready, adapter=adapter)
    prepare_model(prepared, adapter)
    with WithoutCasts():
        logits = prepared(**batch.forward_kwargs(prepared)).logits[0]
        starts = batch.cu_seqlens_q.tolist()
        packed = [logits[start : start + len(s["input_ids"])] for start, s in zip(starts, samples, strict=False)]
        alone = [
            stock(**called(processor, stock, one, sample), use_cache=False).logits[0]
            for one, sample in zip(asked, samples, strict=True)
        ]
        expected, actual = gradients(stock, alone), gradients(prepared, packed)
    assert largest(packed, alone) <= 1e-12
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest(list(expected.values()), [actual[name] for name in expected]) <= 1e-10 * scale


def test_the_number_of_families():
    assert len(PROCESSORS) >= 20


@pytest.mark.parametrize("family", ["llava_next", "llava_next_video", "granite4_vision"])
def test_tiles_of_padding_are_left_out(family):
    """A processor fills up every image to the tiles of the largest; a sample has those that the tower needs."""
    processor = PROCESSORS[family][0]()
    encoder = encoder_of(processor, fitting_config(family, processor))
    asked = example(np.random.default_rng(0), [(16, 30), (48, 40)])
    stacked = processor.image_processor([asked["images"]], return_tensors="pt")["pixel_values"]
    pixels = encoder.encode(asked)["pixel_values"]
    tiles = sum(t for t, _, _ in encoder.measure([asked])[0].grids)
    assert pixels.shape == (tiles, *stacked.shape[2:]) and pixels.numel() < stacked.numel()
    assert bool(pixels.flatten(1).any(dim=1).all()), "no tile is empty"


#: Their processors do not say where they put real media tokens.
UNSAID = ("idefics2", "paligemma", "chameleon")


@pytest.mark.parametrize("family", PROCESSORS)
def test_text_that_spells_the_placeholder(family):
    """It stays text, beside a real image, and is measured so; or it is refused by name."""
    processor = PROCESSORS[family][0]()
    encoder = encoder_of(processor, fitting_config(family, processor))
    mark = placeholder(processor, "image")
    asked = [example(np.random.default_rng(3), [(40, 60)], question) for question in ("What is ?", f"What is {mark}?")]
    if family in UNSAID:
        with pytest.raises(MediaMismatchError, match=r"text spells a media token, and .*Processor does not say"):
            encoder.encode(asked[1])
        return
    plain, spelled = (encoder.prepare(one) for one in asked)
    more = processor.tokenizer(f"What is {mark}?")["input_ids"], processor.tokenizer("What is ?")["input_ids"]
    assert len(spelled.tensor("input_ids")) - len(plain.tensor("input_ids")) == len(more[0]) - len(more[1])
    assert spelled.layout.runs[:, 1:].tolist() == plain.layout.runs[:, 1:].tolist()
    assert encoder.measure(asked)[1].tokens == len(spelled.tensor("input_ids"))


@pytest.mark.parametrize("family", PROCESSORS)
def test_measured_without_pixels(family):
    check_measured(family, PROCESSORS[family][0]())


def check_measured(family, processor):
    """Length and grids of 50 sizes equal those of the encoded samples, each alone, and of samples with two images."""
    encoder = encoder_of(processor, fitting_config(family, processor))
    rng = np.random.default_rng(1)
    sizes = np.exp(rng.uniform(np.log(24), np.log(200), (50, 2))).astype(int).tolist()
    asked = [example(rng, [size]) for size in sizes] + [example(rng, sizes[at : at + 2]) for at in range(10)]
    measured = encoder.measure(asked)
    for one, found in zip(asked, measured, strict=True):
        sample = encoder.prepare(one)
        assert (found.tokens, list(found.grids)) == (len(sample.tensor("input_ids")), grids_of(sample, encoder.adapter))


@pytest.mark.parametrize("family", ["llava_next", "idefics3", "internvl", "lighton_ocr"])
def test_offline_index(family, tmp_path):
    """Counts of an index are those of the samples, and it is not taken for one of other settings."""
    processor = PROCESSORS[family][0]()
    encoder = encoder_of(processor, fitting_config(family, processor))
    rng = np.random.default_rng(2)
    asked = [example(rng, rng.integers(20, 120, (count, 2)).tolist()) for count in (0, 1, 2, 3, 1)]
    index = OfflineIndex.build(tmp_path, asked, encoder, progress=False)
    samples = [encoder.prepare(one) for one in asked]
    assert index.tokens(range(5)).tolist() == [len(sample.tensor("input_ids")) for sample in samples]
    for number, sample in enumerate(samples):
        assert index.grids(number) == (grids_of(sample, encoder.adapter) if number else [])
    plan = OfflineConfig(max_tokens=2048, samples_per_step=5, num_microbatches=1)
    packs = list(index.source(asked, encoder, plan, rank=0, num_ranks=1))
    assert sorted(len(sample["input_ids"]) for pack in packs for sample in pack) == sorted(index.tokens(range(5)).tolist())
    name = next(iter(set(encoder.settings["processor"]) & {"patch_size", "image_seq_len", "image_seq_length"}))
    setattr(processor, name, 7)
    with pytest.raises(ValueError, match=name):
        index.source(asked, encoder, plan, rank=0, num_ranks=1)


def grids_of(sample, adapter):
    """Return the grid of each item of a sample, from its own fields."""
    found = item_grids(sample.values, adapter) or {name: one.grids for name, one in media_items(sample.values, adapter).items()}
    return [tuple(grid) for grid in found["image"].tolist()]


@pytest.mark.parametrize("family", ["llava", "idefics3", "smolvlm", "gemma3", "lighton_ocr"])
def test_a_saved_processor_is_opened_with_its_settings(family, tmp_path):
    """Also without torchvision: what a row has in tokens is a setting of the processor, not of its image processor."""
    processor = PROCESSORS[family][0]()
    processor.save_pretrained(tmp_path)
    opened = load_processor(tmp_path)
    config = fitting_config(family, processor)
    asked = example(np.random.default_rng(0), SIZES[2])
    saved, again = (encoder_of(one, config).encode(asked)["input_ids"] for one in (processor, opened))
    assert torch.equal(saved, again)
