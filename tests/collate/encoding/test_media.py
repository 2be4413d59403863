"""Media as files and in memory: orientation, bit depth, videos and their rate, what cannot be read and what becomes of it."""

import io
import json
import random
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers.video_utils import VideoMetadata

from evenpack.collate import EncoderConfig, SampleEncoder, load_processor
from evenpack.collate.encoding import UnreadableMediaError
from evenpack.collate.encoding.media import decoded, image_size, open_image, open_video
from evenpack.core import SampleError, UndeclaredFieldError
from evenpack.scheduler import PackingScheduler, SchedulerConfig

from . import tiny

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
ANSWER = {"role": "assistant", "content": "A"}


def asks(*parts, **columns):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **columns}


def saved(image, kind="png", **settings):
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def turned(kind, orientation=6, height=56, width=112):
    """Return the file of an image that is stored `height` x `width` and shown turned."""
    image = tiny.picture(random.Random(1), height, width)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, kind, exif=exif.tobytes())


# --- orientation ---


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_orientation_is_one_rule_for_every_holder_and_for_sizes(kind, orientation, tmp_path):
    encoder, data = tiny.encoder(), turned(kind, orientation)
    (tmp_path / "a b").write_bytes(data)
    holders = [
        data,
        memoryview(data),
        tmp_path / "a b",
        {"bytes": data, "path": "a b"},
        Image.open(io.BytesIO(data)),
        f"file://{tmp_path}/a%20b",
    ]
    wanted = [1, 8, 4] if orientation in (6, 8) else [1, 4, 8]
    samples = [encoder.encode(asks(IMAGE, images=[one])) for one in holders]
    assert [sample["image_grid_thw"].tolist() for sample in samples] == [[wanted]] * len(holders)
    for sample in samples[1:]:
        assert torch.equal(sample["pixel_values"], samples[0]["pixel_values"])
    holders[4] = Image.open(io.BytesIO(data))  # the other one has its pixels by now
    measured = encoder.measure([asks(IMAGE, images=[one]) for one in holders])
    assert [one.grids for one in measured] == [(tuple(wanted),)] * len(holders)


def test_the_size_of_a_png_is_read_without_its_pixels():
    for data, wanted in ((saved(tiny.picture(random.Random(0), 56, 112)), (56, 112)), (turned("png"), (112, 56))):
        image = open_image(data, "x")
        assert image_size(image) == wanted
        if wanted == (56, 112):
            assert image.fp is not None, "the pixels were decoded"
        assert decoded(image, "x").size == wanted[::-1]


def test_metadata_behind_the_pixels_of_a_png():
    data = turned("png")
    at = data.index(b"eXIf") - 4
    length = int.from_bytes(data[at : at + 4])
    chunk, end = data[at : at + 12 + length], data.index(b"IEND") - 4
    moved = data[:at] + data[at + len(chunk) : end] + chunk + data[end:]
    assert image_size(open_image(moved, "x")) == (112, 56) and decoded(open_image(moved, "x"), "x").size == (56, 112)


# --- bit depth and modes ---


def grey(mode, values):
    return {
        "I;16": lambda: Image.fromarray(np.array([values], np.uint16)),
        "F": lambda: Image.fromarray(np.array([values], np.float32)),
        "I": lambda: Image.fromarray(np.array([values], np.int32)),
    }[mode]()


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bits_are_scaled(kind):
    data = saved(grey("I;16", [0, 257, 32768, 65535]), kind)
    pixels = np.asarray(decoded(open_image(data, "x"), "x"))
    assert pixels[0, :, 0].tolist() == [0, 1, 128, 255] and pixels.shape == (1, 4, 3)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (saved(grey("F", [0.0, 0.5]), "tiff"), "mode 'F', whose range is not known"),
        (saved(grey("I", [0, 70000]), "tiff"), "mode 'I', whose range is not known"),
        (np.zeros((4, 4, 3), np.float32), r"must be uint8 \(0 to 255\), got float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 3), np.uint16), r"must be uint8 \(0 to 255\), got uint16"),
        (torch.zeros(3, 4, 4), r"must be uint8 \(0 to 255\), got float32"),
        (np.zeros((5, 5, 2), np.uint8), r"must be \[H, W\].*got \[5, 5, 2\]"),
    ],
)
def test_pixels_without_a_known_range_are_refused(item, message):
    with pytest.raises(UnreadableMediaError, match=f"^example 0, image 0: .*{message}"):
        tiny.encoder().encode(asks(IMAGE, images=[item]))
    (measured,) = tiny.encoder().measure([asks(IMAGE, images=[item])])
    assert re.match(f"example 0, image 0: [^0]*{message}", str(measured)), measured


def test_other_modes_are_converted():
    colour = tiny.picture(random.Random(2), 40, 30)
    transparent = colour.convert("P")
    transparent.info["transparency"] = bytes(range(256))
    for image in (colour.convert("1"), colour.convert("L"), colour.convert("LA"), colour.convert("CMYK"), transparent):
        assert decoded(image, "x").mode == "RGB"
    for array in (np.asarray(colour), np.asarray(colour).transpose(2, 0, 1), torch.from_numpy(np.array(colour))):
        assert np.array_equal(np.asarray(decoded(open_image(array, "x"), "x")), np.asarray(colour))


# --- what a library raises ---


def test_whatever_a_library_raises_names_the_example(monkeypatch):
    encoder = tiny.encoder()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = saved(tiny.picture(random.Random(1), 90, 90))
    with pytest.raises(UnreadableMediaError, match=r"example 3 \('x'\), image 0: .*exceeds limit") as found:
        encoder.encode(asks(IMAGE, images=[data], sample_id="x"), 3)
    assert isinstance(found.value.__cause__, Image.DecompressionBombError)
    monkeypatch.setattr(encoder, "write", None)  # any other error, in whatever stage
    with pytest.raises(SampleError, match="example 3: TypeError") as found:
        encoder.encode(asks({"type": "text", "text": "?"}), 3)
    assert isinstance(found.value.__cause__, TypeError)
    (error,) = encoder.measure([asks({"type": "text", "text": "?"})], 5)
    assert isinstance(error, SampleError) and "example 5" in str(error)


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return asks(IMAGE, images=["no.png"])


def test_the_count_of_a_worker_says_which_worker():
    loader = DataLoader(Failing(), batch_size=1, collate_fn=tiny.encoder().encode_list, num_workers=1)
    with pytest.raises(UnreadableMediaError, match="worker 0: example 0 of this process, image 0: cannot read"):
        list(loader)


# --- the policy for what cannot be read ---


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("no.png", "cannot read"),
        (saved(tiny.picture(random.Random(1), 90, 90))[:2000], "cannot decode"),
        (saved(tiny.picture(random.Random(1), 1, 300)), "refuses the example"),
    ],
)
def test_an_unreadable_example_is_an_error_or_dropped_and_counted(item, message):
    good, bad = asks(IMAGE, images=[tiny.picture(random.Random(0), 60, 60)]), asks(IMAGE, images=[item])
    with pytest.raises(UnreadableMediaError, match=f"example 1.*{message}"):
        tiny.encoder().encode_list([good, bad, good])
    encoder = tiny.encoder(on_unreadable="drop")
    with pytest.warns(RuntimeWarning, match=f"dropped, .*example 1.*{message}"):
        samples = encoder.encode_list([good, bad, good])
    assert len(samples) == 2 and samples.num_dropped == 1 and encoder.counts["unreadable_dropped"] == 1


@pytest.mark.filterwarnings("ignore:dropped, as on_unreadable")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_scheduler_counts_what_the_encoder_left_out(num_workers):
    encoder = tiny.encoder(on_unreadable="drop")
    examples = [asks(IMAGE, images=["no.png" if at % 4 == 1 else tiny.picture(random.Random(at), 60, 60)]) for at in range(8)]
    loader = DataLoader(examples, batch_size=4, collate_fn=encoder.encode_list, num_workers=num_workers)
    config = SchedulerConfig(max_tokens=512, samples_per_step=3)
    with PackingScheduler(loader, config=config, adapter=encoder.adapter) as scheduler:
        stats = [step.stats for step in scheduler]
        assert [one.num_samples for one in stats] == [3, 3] and scheduler.num_dropped == 2


def test_what_is_missing_for_every_item_is_never_dropped(monkeypatch):
    """A package, a limit or a rate that is not there would drop the whole dataset."""
    video = {"messages": [{"role": "user", "content": [{"type": "video", "video": FRAMES}]}, ANSWER]}
    for encoder, message in (
        (tiny.encoder(on_unreadable="drop"), "the processor has no video_processor"),
        (tiny.encoder(on_unreadable="drop", videos=True), "the frames have no rate"),
        (
            tiny.encoder(on_unreadable="drop", videos=True, video_min_pixels=None, video_max_pixels=None),
            "give video_min_pixels",
        ),
    ):
        with pytest.raises(UnreadableMediaError, match=message):
            encoder.encode(video)
    encoder = tiny.encoder(on_unreadable="drop")
    monkeypatch.setattr(encoder._process, "_call", lambda *args: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(SampleError, match="MemoryError: out of memory"):
        encoder.encode(asks(IMAGE, images=[tiny.picture(random.Random(0), 60, 60)]))
    monkeypatch.setattr(Image, "open", lambda *args: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(SampleError, match="MemoryError: out of memory"):
        encoder.encode(asks(IMAGE, images=[b"a file"]))


def test_settings_of_the_policy_are_checked():
    with pytest.raises(ValueError, match="on_unreadable must be 'error' or 'drop', got 'skip'"):
        EncoderConfig(on_unreadable="skip")
    with pytest.raises(ValueError, match="source_fps must be a number above 0, got 0"):
        EncoderConfig(source_fps=0)


def test_measuring_refuses_the_columns_that_encoding_refuses():
    encoder, example = tiny.encoder(), asks({"type": "text", "text": "?"}, source="web")
    (measured,) = encoder.measure([example])
    assert isinstance(measured, UndeclaredFieldError) and "undeclared column 'source'" in str(measured)


# --- videos ---


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A video of 16 frames at 8 frames per second, 56 x 84 pixels, each frame of one brightness."""
    return clip_in("mp4", tmp_path_factory.mktemp("clip"))


def clip_in(container_format, folder):
    av = pytest.importorskip("av")
    path = folder / f"a.{container_format}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 84, 56, "yuv420p"
        for at in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((56, 84, 3), 10 * at, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("pixels", [True, False])
def test_a_cut_file_is_refused_though_it_can_be_decoded(tmp_path, pixels):
    data = clip_in("mkv", tmp_path).read_bytes()
    assert len(open_video(data, "x", pixels=pixels)[0]) == 16
    for share in (0.8, 0.5):
        with pytest.raises(UnreadableMediaError, match=r"x: cannot read .*the file is cut: it ends after \S+ of 2.00 seconds"):
            open_video(data[: int(share * len(data))], "x", pixels=pixels)


def test_a_video_file_from_every_holder(clip):
    data = clip.read_bytes()
    holders = [clip, str(clip), f"file://{clip}", data, {"bytes": data, "path": None}, {"path": str(clip)}, "a.mp4"]
    for item in holders:
        frames, metadata = open_video(item, "x", clip.parent)
        assert frames.shape == (16, 56, 84, 3) and abs(frames.mean(axis=(1, 2, 3)) - 10 * np.arange(16)).max() < 4
        assert metadata == {"total_num_frames": 16, "frames_indices": list(range(16)), "fps": 8.0, "duration": 2.0}


@pytest.mark.parametrize(("matrix", "turned"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_a_video_is_turned_as_its_container_says(clip, matrix, turned):
    data = bytearray(clip.read_bytes())
    at = data.index(b"tkhd") + 44  # the display matrix of the track, 16.16 fixed point, row by row
    a, b, c, d = (value << 16 for value in matrix)
    data[at : at + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in (a, b, 0, c, d, 0, 0, 0, 1 << 30))
    plain, frames = open_video(clip, "x")[0], open_video(bytes(data), "x")[0]
    assert np.array_equal(frames, np.rot90(plain, turned, axes=(1, 2)))


def test_positions_of_a_video_follow_its_rate(clip):
    """16 frames at 8 a second: a temporal patch of two frames lasts a quarter of a second."""
    encoder = SampleEncoder(tiny.processor(videos=True), tiny.adapter(), **tiny.LIMITS, folder=clip.parent)
    frames, _ = open_video(clip, "x")
    items = [
        "a.mp4",
        {"frames": frames, "fps": np.float32(8)},
        {"frames": [Image.fromarray(frame) for frame in frames], "fps": 8},
        {"frames": frames, "metadata": {"fps": 24.0, "total_num_frames": 48, "frames_indices": list(range(0, 48, 3))}},
        {"frames": frames, "metadata": VideoMetadata(total_num_frames=16, fps=8.0)},
    ]
    for item in items:
        sample = encoder.encode(asks(VIDEO, videos=[item]))
        assert sample["second_per_grid_ts"].tolist() == [0.25] and sample["video_grid_thw"].tolist() == [[8, 4, 6]]
    part = {"type": "video", "video": frames, "fps": 8}
    tiny.assert_same(encoder.encode(asks(part)), encoder.encode(asks(VIDEO, videos=[items[1]])))
    slow = SampleEncoder(tiny.processor(videos=True), tiny.adapter(), **tiny.LIMITS, source_fps=8)
    for item in (frames, {"frames": frames, "metadata": {"fps": None}}):
        assert slow.encode(asks(VIDEO, videos=[item]))["second_per_grid_ts"].tolist() == [0.25]


def test_timestamps_follow_the_rate():
    encoder = tiny.encoder("qwen3_vl", videos=True)
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    for fps, wanted in ((1.0, ["<0.5 seconds>", "<2.5 seconds>"]), (4.0, ["<0.1 seconds>", "<0.6 seconds>"])):
        text = encoder.tokenizer.decode(encoder.encode(asks(VIDEO, videos=[{"frames": frames, "fps": fps}]))["input_ids"])
        assert [one for one in wanted if one in text] == wanted, text


FRAMES = np.zeros((4, 56, 56, 3), np.uint8)


@pytest.mark.parametrize(
    ("video", "settings", "message"),
    [
        (FRAMES, {}, "the frames have no rate, and positions or timestamps of qwen2_5_vl need one"),
        (FRAMES, {"video_fps": 2.0}, "the frames have no rate, and sampling at video_fps=2"),
        ({"frames": FRAMES, "fps": 0}, {}, "fps must be a number above 0, got 0"),
        ({"frames": FRAMES, "fps": -2.0}, {}, "fps must be a number above 0, got -2.0"),
        ({"frames": b"file", "fps": 2}, {}, "a file has a rate of its own"),
        ({"frames": FRAMES, "metadata": {"fps": 2.0, "frames_indices": [0, 1]}}, {}, "4 frames, but the metadata name 2"),
        ({"frames": FRAMES, "metadata": {"fps": 8.0, "total_num_frames": 16}}, {"video_fps": 2.0}, "sampled already"),
        (FRAMES.astype(np.float32), {"source_fps": 2}, "must be uint8.*got float32"),
        ([], {"source_fps": 2}, "frames of a video must be of one size, got none"),
        (b"junk", {}, "cannot read the video b'junk'"),
        ("no.mp4", {}, "cannot read the video 'no.mp4'"),
        ({"bytes": None, "path": None}, {}, "the video is missing"),
        ("https://x/y.mp4", {}, "not from the network"),
    ],
)
def test_a_video_that_cannot_be_used_is_named(video, settings, message):
    encoder = tiny.encoder(videos=True, **settings)
    with pytest.raises(UnreadableMediaError, match=rf"example 2 \('v'\), video 0: .*{message}"):
        encoder.encode(asks(VIDEO, videos=[video], sample_id="v"), 2)


def test_an_energon_part_is_a_video(clip):
    energon = pytest.importorskip("evenpack.integrations.energon")
    example = energon.crude_example({"json": json.dumps(asks(VIDEO)).encode(), "0.mp4": clip.read_bytes()}, "k")
    sample = tiny.encoder(videos=True).encode(example)
    assert sample["video_grid_thw"].tolist() == [[8, 4, 6]] and sample["second_per_grid_ts"].tolist() == [0.25]


# --- processors ---


@pytest.fixture
def checkpoint(tmp_path):
    tiny.processor().save_pretrained(tmp_path / "p")
    return tmp_path / "p"


def test_a_processor_whose_class_is_unknown_is_no_tokenizer(checkpoint):
    for settings in ({}, {"image_processor_type": "FutureImageProcessor"}, {"image_processor_type": "Qwen2VLImageProcessor"}):
        for file in checkpoint.glob("*processor_config.json"):
            file.write_text(json.dumps({"processor_class": "FutureProcessor", **settings}))
        with pytest.raises(ValueError, match=r"transformers .* the processor 'FutureProcessor'"):
            load_processor(checkpoint)
    for file in checkpoint.glob("*processor_config.json"):
        file.unlink()
    named = json.loads((checkpoint / "tokenizer_config.json").read_text()) | {"processor_class": "FutureProcessor"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match="does not know the processor 'FutureProcessor' that its tokenizer belongs to"):
        load_processor(checkpoint)
    (checkpoint / "processor_config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"processor_config.json is no JSON"):
        load_processor(checkpoint)


def test_a_processor_by_its_name_on_the_hub(checkpoint, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--org--name" / "snapshots" / ("1" * 40)
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert type(load_processor("org/name")).__name__ == "Qwen2_5_VLProcessor"
    with pytest.raises(ValueError, match="'org/other' is no folder, and the hub has no such model or cannot be reached"):
        load_processor("org/other")
    with pytest.raises(ValueError, match="no folder /no/such"):
        load_processor("/no/such")
