"""From an image's size to its grid without pixels, against each family's real image processor."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from PIL import Image

from evenpack.collate.encoding import EncoderConfig, ImageRule, grid_of, image_rule
from evenpack.collate.encoding.checks import check_limits
from evenpack.collate.encoding.settings import media_processor_record
from evenpack.collate.encoding.sizes import counts_pixels
from evenpack.models import adapter_for

#: Image processors of the families that see, and the limits that keep the pixels of 500 images small.
PROCESSORS = {
    "Qwen2VLImageProcessorPil": dict(patch_size=14),  # Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni
    "Qwen2VLImageProcessorPil, patches of 16": dict(patch_size=16),  # Qwen3-VL, Qwen3.5, Qwen3-Omni, Cosmos
    "CohereCompassImageProcessorPil": {},
    "Glm4vImageProcessorPil": {},
    "Glm46VImageProcessorPil": {},
    "Ernie4_5_VLMoeImageProcessorPil": {},
    "PaddleOCRVLImageProcessorPil": {},
}
COUNT = 500


def sizes(seed: str) -> list[tuple[int, int]]:
    """Return sizes of every kind: tiny, usual, long and thin, and far above the limits' area."""
    rng = random.Random(seed)
    kinds = [(1, 60), (20, 400), (300, 700)]
    return [(rng.randint(*rng.choice(kinds)), rng.randint(*rng.choice(kinds))) for _ in range(COUNT)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_grids_equal_the_processor_s(name):
    """Limits of every kind are passed in the call, as the encoder passes them."""
    processor = getattr(transformers, name.partition(",")[0])(**PROCESSORS[name], do_rescale=False, do_normalize=False)
    rng = random.Random(name)
    differing = refused = 0
    for height, width in sizes(name):
        least = rng.choice([784, 3136, 20_000])
        most = least + rng.choice([0, 5_000, 100_000])
        rule = image_rule(processor, least, most)
        image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        try:
            size = {"shortest_edge": least, "longest_edge": most}
            wanted = tuple(processor(image, size=size, return_tensors="np")["image_grid_thw"][0].tolist())
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="more than 200 times as long as wide"):
                grid_of(height, width, rule)
            continue
        differing += grid_of(height, width, rule) != wanted
    assert differing == 0
    assert refused < COUNT // 10


def test_an_image_processor_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"token counts of CLIPImageProcessor\w* are not known without pixels; known: Qwen2VL"):
        image_rule(transformers.CLIPImageProcessorPil(), 1, 2)


def test_an_image_of_no_size_is_refused():
    rule = ImageRule(rounding="nearest", patch_size=14, merge_size=2, min_pixels=1, max_pixels=10_000)
    with pytest.raises(ValueError, match="an image of 0 x 5 pixels"):
        grid_of(0, 5, rule)


#: Image processors whose `size` is the length of sides: limits of an area would give other pixels, or an error.
OTHERS = tuple(
    f"{name}ImageProcessorPil"
    for name in (
        "CLIP",
        "Siglip",
        "Gemma3",
        "Idefics2",
        "Idefics3",
        "SmolVLM",
        "LlavaNext",
        "LlavaOnevision",
        "Pixtral",
        "Aria",
    )
)


@pytest.mark.parametrize("name", [*PROCESSORS, "VideoLlama3ImageProcessorPil", *OTHERS])
def test_limits_of_the_area_go_to_processors_that_know_them(name):
    processor = SimpleNamespace(image_processor=getattr(transformers, name.partition(",")[0])())
    adapter = adapter_for("qwen2_5_vl")
    assert counts_pixels(processor.image_processor) == (name not in OTHERS)
    given, left_out = EncoderConfig(min_pixels=784, max_pixels=9999), EncoderConfig()
    if name in OTHERS:
        with pytest.raises(ValueError, match=f"leave out min_pixels=784 and max_pixels: {name} limits no area"):
            check_limits(processor, adapter, given)
        check_limits(processor, adapter, left_out)
    else:
        check_limits(processor, adapter, given)
        with pytest.raises(ValueError, match="give min_pixels and max_pixels"):
            check_limits(processor, adapter, left_out)


def test_limits_of_videos_go_to_processors_that_know_them():
    class Frames:
        def __init__(self):
            self.size = {"height": 384, "width": 384}

    processor = SimpleNamespace(video_processor=Frames())
    with pytest.raises(ValueError, match="leave out video_min_pixels=784 and video_max_pixels: Frames limits no area"):
        check_limits(processor, adapter_for("qwen2_5_vl"), EncoderConfig(video_min_pixels=784, video_max_pixels=9999))


def test_settings_of_a_processor_without_limits_are_recorded():
    one, other, same = (transformers.Idefics3ImageProcessorPil(size={"longest_edge": edge}) for edge in (364, 728, 364))
    assert media_processor_record(one) != media_processor_record(other)
    assert media_processor_record(one) == media_processor_record(same)
