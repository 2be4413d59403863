"""Video files through the real video processors of transformers: ids, grids, pixels, timestamps and positions are their own."""

import random
from fractions import Fraction

import av
import msgspec
import numpy as np
import pytest
import torch

# Wheels of torchvision for another build of torch cannot load their operators; the processors need none of them.
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import transformers  # noqa: E402
from transformers.video_utils import load_video  # noqa: E402

from benchmarks.families.processors import BESIDE_TORCHVISION, fitting_config, fitting_model, with_videos  # noqa: E402
from evenpack.collate import SampleEncoder, pack_samples  # noqa: E402
from evenpack.collate.encoding.errors import UnreadableMediaError  # noqa: E402
from evenpack.models import adapter_for, prepare_model  # noqa: E402
from evenpack.scheduler import OfflineIndex  # noqa: E402

from ...models.reference import own_positions, rope_stub  # noqa: E402
from ..masks.chat_formats import tokenizer  # noqa: E402
from .test_processors import check_exact, check_measured  # noqa: E402
from .tiny import LIMITS, TEMPLATE, adapter, picture  # noqa: E402

#: Frames and rate of each clip: few and many, slow and fast, rates that are no whole number, odd numbers of frames.
CLIPS = [
    (8, "4"), (9, "25"), (30, "30"), (50, "30000/1001"), (64, "10"), (3, "1"), (120, "24"), (33, "12"), (100, "50"), (7, "5"),
]  # fmt: skip
GLM_TEMPLATE = TEMPLATE
for _kind in ("image", "video"):
    _qwen, _glm = f"<|vision_start|><|{_kind}_pad|><|vision_end|>", f"<|begin_of_{_kind}|><|{_kind}|><|end_of_{_kind}|>"
    GLM_TEMPLATE = GLM_TEMPLATE.replace(_qwen, _glm)
GLM_TOKENS = ["<|image|>", "<|video|>", *(f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end"))]
SIZE = {"shortest_edge": LIMITS["video_min_pixels"], "longest_edge": LIMITS["video_max_pixels"]}


def processor(family):
    if family == "glm4v":
        words = tokenizer()
        words.add_special_tokens({"additional_special_tokens": GLM_TOKENS})
        parts = transformers.Glm4vImageProcessor(), words, transformers.Glm4vVideoProcessor()
        return transformers.Glm4vProcessor(*parts, chat_template=GLM_TEMPLATE)
    name, video, patch = {"qwen2_5_vl": ("Qwen2_5_VL", "Qwen2VL", 14), "qwen3_vl": ("Qwen3VL", "Qwen3VL", 16)}[family]
    images = transformers.Qwen2VLImageProcessor(patch_size=patch)
    videos = getattr(transformers, f"{video}VideoProcessor")(cap_pixels_per_frame=False)
    return getattr(transformers, f"{name}Processor")(images, tokenizer(), videos, chat_template=TEMPLATE)


def family_of(name, processor):
    if name != "glm4v":
        return adapter(name)
    ids = processor.tokenizer.convert_tokens_to_ids
    start, end = ids("<|begin_of_image|>"), ids("<|end_of_image|>")
    tokens = {"image": ids("<|image|>"), "video": ids("<|image|>")}
    markers = {"video_start": ids("<|begin_of_video|>"), "video_end": ids("<|end_of_video|>")}
    return msgspec.structs.replace(adapter_for(name), media_tokens=tokens, vision_start=start, vision_end=end, **markers)


def write_clip(path, frames, rate, codec="mpeg4", size=(64, 96)):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for index in range(frames):
            pixels = np.random.default_rng(index).integers(0, 256, (*size, 3), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return str(path)


def example(*videos, images=()):
    content = [*({"type": "image"} for _ in images), *({"type": "video"} for _ in videos), {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    return {"messages": [{"role": "user", "content": content}, answer], "videos": list(videos), "images": list(images)}


def by_hand(processor, path, fps):
    """The processor on its own, with frames as transformers reads them."""
    frames, metadata = load_video(path, backend="pyav")
    text = processor.apply_chat_template(example(path)["messages"], tokenize=False)
    sampling = {"do_sample_frames": False} if fps is None else {"do_sample_frames": True, "fps": fps}
    return processor(text=[text], videos=[[frames]], videos_kwargs={"size": SIZE, **sampling, "video_metadata": [[metadata]]})


@pytest.mark.parametrize("fps", [None, 2.0, 5.0])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_files_are_encoded_as_the_processor_does_and_measured_without_pixels(tmp_path, family, fps):
    own = processor(family)
    declared = family_of(family, own)
    encoder = SampleEncoder(own, declared, **LIMITS, video_fps=fps)
    for number, (frames, rate) in enumerate(CLIPS):
        path = write_clip(tmp_path / f"{number}.mp4", frames, rate)
        want, sample = by_hand(own, path, fps), encoder.encode(example(path))
        assert sample["input_ids"].tolist() == want["input_ids"][0], (frames, rate)  # timestamps too
        assert sample["video_grid_thw"].tolist() == np.asarray(want["video_grid_thw"]).tolist()
        assert torch.equal(sample["pixel_values_videos"], torch.as_tensor(want["pixel_values_videos"]))
        if declared.has_seconds:
            assert sample["second_per_grid_ts"].tolist() == pytest.approx(np.asarray(want["second_per_grid_ts"]).tolist())
        pack = pack_samples([sample], adapter=encoder.adapter)
        assert np.array_equal(pack.position_ids[:, 0].numpy(), own_positions(rope_stub(declared), sample, declared))
        (measured,) = encoder.measure([example(path)])
        assert measured.tokens == len(sample["input_ids"])
        assert [list(grid) for grid in measured.grids] == sample["video_grid_thw"].tolist()


@pytest.mark.parametrize("family", BESIDE_TORCHVISION)
def test_image_processors_that_need_torchvision(family):
    check_exact(family, BESIDE_TORCHVISION[family][0]())
    check_measured(family, BESIDE_TORCHVISION[family][0]())


#: Clips, and rates of sampling; None: all frames.
@pytest.mark.parametrize("fps", [None, 2.0, 5.0])
@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
def test_frames_as_images(tmp_path, family, fps):
    """Each frame is a row of pixels: ids, timestamps in the text and pixels are the processor's own, and its refusals too."""
    own = with_videos(family)
    encoder = SampleEncoder(own, adapter_for(fitting_config(family, own)), video_fps=fps)
    refused = 0
    for number, (frames, rate) in enumerate(CLIPS):
        path = write_clip(tmp_path / f"{number}.mp4", frames, rate)
        asked = example(path)
        loaded, metadata = load_video(path, backend="pyav")
        text = own.tokenizer.apply_chat_template(asked["messages"], tokenize=False)
        sampling = {"do_sample_frames": False} if fps is None else {"do_sample_frames": True, "fps": fps}
        settings = {**sampling, "video_metadata": [[metadata]], "return_tensors": "pt"}
        try:
            want = own(text=[text], videos=[[torch.from_numpy(loaded)]], videos_kwargs=settings)
        except (ValueError, ZeroDivisionError):  # a clip shorter than one interval, or slower than the rate
            refused += 1
            (measured,) = encoder.measure([asked])
            assert isinstance(measured, UnreadableMediaError)
            with pytest.raises(UnreadableMediaError, match="the processor refuses the example"):
                encoder.encode(asked)
            continue
        sample = encoder.encode(asked)
        assert sample["input_ids"].tolist() == want["input_ids"][0], (frames, rate)
        assert torch.equal(sample["pixel_values"], torch.as_tensor(want["pixel_values"]))
        ready = encoder.prepare(asked)
        rows = ready.tensor("pixel_values").shape[encoder.adapter.fields["pixel_values"].axis]
        assert int((sample["mm_token_type_ids"] == 1).sum()) == rows * 4
        (measured,) = encoder.measure([asked])
        assert (measured.tokens, len(measured.grids)) == (len(sample["input_ids"]), rows)
    assert refused <= (2 if fps else 0), "most clips are encoded"


def test_frames_and_images_in_one_pack(tmp_path):
    """A video and an image of a sample lie in the order of the text, and a pack with them equals the stock model alone."""
    own = with_videos("internvl")
    stock, prepared = fitting_model("internvl", own), fitting_model("internvl", own)
    encoder = SampleEncoder(own, adapter_for(stock.config), video_fps=2.0)
    paths = [write_clip(tmp_path / f"{at}.mp4", *CLIPS[at]) for at in (0, 2)]
    data = [example(paths[0], images=[picture(random.Random(0))]), example(paths[1]), example()]
    index = OfflineIndex.build(tmp_path / "index", data, encoder, progress=False)
    samples = [encoder.prepare(one) for one in data]
    assert index.tokens([0, 1, 2]).tolist() == [len(sample.tensor("input_ids")) for sample in samples]
    for sample in samples:
        if "pixel_values" in sample.values:
            sample.values["pixel_values"] = sample.values["pixel_values"].double()
    batch = pack_samples(samples, adapter=encoder.adapter)
    logits = prepare_model(prepared, encoder.adapter)(**batch.forward_kwargs(prepared)).logits[0]
    for start, sample in zip(batch.cu_seqlens_q.tolist(), samples, strict=False):
        ids = sample.tensor("input_ids")
        pixels = {name: value for name, value in sample.values.items() if name == "pixel_values"}
        alone = stock(input_ids=ids[None], **pixels, use_cache=False).logits[0]
        assert float((logits[start : start + len(ids)] - alone).detach().abs().max()) <= 1e-12


#: Containers and codecs; the header of the first three counts no frames.
CONTAINERS = [("webm", "libvpx-vp9"), ("mkv", "mpeg4"), ("ts", "mpeg2video"), ("avi", "mpeg4"), ("mp4", "libx264")]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_containers(tmp_path, container, codec):
    path = write_clip(tmp_path / f"clip.{container}", 24, "12", codec=codec)
    encoder = SampleEncoder(processor("qwen3_vl"), adapter("qwen3_vl"), **LIMITS, video_fps=2.0)
    (measured,) = encoder.measure([example(path)])
    assert measured.tokens == len(encoder.encode(example(path))["input_ids"])


def test_an_index_of_videos_and_images(tmp_path):
    """Two videos and an image in one example; sizes and grids of the index are those of the encoded samples."""
    encoder = SampleEncoder(processor("qwen2_5_vl"), adapter("qwen2_5_vl"), **LIMITS, video_fps=2.0)
    paths = [write_clip(tmp_path / f"{at}.mp4", frames, rate) for at, (frames, rate) in enumerate(CLIPS[:4])]
    data = [example(paths[0], paths[1], images=[picture(random.Random(0))]), example(paths[2]), example(), example(paths[3])]
    index = OfflineIndex.build(tmp_path / "index", data, encoder, progress=False)
    for number, one in enumerate(data):
        sample = encoder.encode(one)
        grids = [grid for name in ("image", "video") for grid in np.asarray(sample.get(f"{name}_grid_thw", ())).tolist()]
        assert index.tokens([number]).tolist() == [len(sample["input_ids"])]
        assert [list(grid) for grid in index.grids(number)] == grids
