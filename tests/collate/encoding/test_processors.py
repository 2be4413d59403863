"""Real processors of families with ordinary positions: samples of `SampleEncoder` in a pack, against the stock model alone."""

import numpy as np
import pytest
import torch

from benchmarks.families.encoded import SIZES, encoded_differences, encoder_of, example, grids_of, measured_differences
from benchmarks.families.processors import PROCESSORS, fitting_config
from evenpack.collate import load_processor
from evenpack.collate.encoding.checks import placeholder
from evenpack.core import MediaMismatchError
from evenpack.scheduler import OfflineConfig, OfflineIndex


@pytest.mark.parametrize("family", PROCESSORS)
def test_samples_of_its_processor_are_exact(family):
    check_exact(family, PROCESSORS[family][0]())


def check_exact(family, processor):
    """Logits and gradients of a pack equal those of the stock model on each sample alone."""
    logits, gradient = encoded_differences(family, processor)
    assert logits <= 1e-12 and gradient <= 1e-10


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
    assert measured_differences(family, processor) == 0


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
