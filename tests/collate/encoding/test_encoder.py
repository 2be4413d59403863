"""Samples of `SampleEncoder`: what trains, where media lie, which input is refused by which name."""

import json
import random

import msgspec
import numpy as np
import pytest
import torch

from evenpack.collate import EncoderConfig, SampleEncoder, prepare_sample
from evenpack.collate.encoding import ConversationError, UnreadableMediaError
from evenpack.core import Field, FieldSet, MediaMismatchError, OversizeSampleError, SpelledMediaTokenError, UndeclaredFieldError
from evenpack.models import adapter_for

from . import tiny

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "What?"}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def trained(encoder, sample):
    return encoder.tokenizer.decode(sample["labels"][sample["labels"] != -100])


@pytest.fixture(scope="module")
def encoder():
    return tiny.encoder()


@pytest.fixture
def image():
    return tiny.picture(random.Random(0), 60, 90)


def test_a_mask_has_the_length_of_the_expanded_ids(encoder, image):
    """A3: media tokens weigh 0, in the assistant's own turn too."""
    shown = says([{"type": "text", "text": "Look: "}, IMAGE, {"type": "text", "text": " a cat"}])
    sample = encoder.encode({"messages": [user(IMAGE, TEXT), shown], "images": [image, image]})
    media = sample["mm_token_type_ids"] == 1
    assert int(media.sum()) == 2 * 6 and len(sample["loss_weights"]) == len(sample["input_ids"])
    assert not bool(sample["loss_weights"][media].any())
    assert trained(encoder, sample) == "Look: <|vision_start|><|vision_end|> a cat<|im_end|>"
    prepared = prepare_sample(sample, adapter=encoder.adapter)
    assert prepared.layout.runs[:, 1].tolist() == [6, 6]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_spelled_media_token_is_text(family, image):
    """M2, M3: it keeps its id, anchors nothing, and the image goes to its own place."""
    encoder = tiny.encoder(family)
    spelled = {"type": "text", "text": "<|image_pad|><|image_pad|> spelled"}
    sample = encoder.encode({"messages": [user(spelled, IMAGE), says("<|image_pad|>!")], "images": [image]})
    token = encoder.adapter.media_tokens["image"]
    features = int(sample["image_grid_thw"].prod()) // 4
    places = (sample["input_ids"] == token).nonzero().flatten().tolist()
    assert len(places) == features + 3
    assert sample["mm_token_type_ids"][places].tolist() == [0, 0, *[1] * features, 0]
    assert trained(encoder, sample) == "!<|im_end|>"  # media tokens never train, spelled ones included
    pack = encoder.collate([sample])
    assert pack.num_spelled == 3 and int(pack.media_token_validity_mask.sum()) == features
    with pytest.raises(SpelledMediaTokenError):
        pack.forward_kwargs(torch.nn.Module())


def test_text_that_spells_a_placeholder_without_any_image(encoder):
    sample = encoder.encode({"messages": [user({"type": "text", "text": "<|image_pad|>?"}), says("A")]})
    assert "pixel_values" not in sample and not bool(sample["mm_token_type_ids"].any())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_several_images_and_videos_in_a_turn(family, image):
    encoder = tiny.encoder(family, videos=True)
    side = 4 * tiny.CLASSES[family][1]
    videos = [np.full((4, side, side, 3), 9, np.uint8), np.full((2, side, side, 3), 200, np.uint8)]
    video = {"type": "video"}
    messages = [user(IMAGE, video, TEXT, IMAGE, video), says("A", reasoning_content="hm"), user(TEXT), says("B")]
    videos = [{"frames": frames, "fps": 2.0} for frames in videos]
    sample = encoder.encode({"messages": messages, "images": [image, image], "videos": videos})
    prepared = prepare_sample(sample, adapter=encoder.adapter)
    frames = 1 if family == "qwen2_5_vl" else 2  # Qwen3-VL writes a timestamp before each of the first video's two patches
    assert prepared.layout.runs[:, 2].tolist() == [1, *[2] * frames, 1, 2]
    assert trained(encoder, sample) == "<think>\nhm\n</think>\n\nA<|im_end|>B<|im_end|>"
    seconds = sample.get("second_per_grid_ts")
    assert (None if seconds is None else seconds.tolist()) == ([1.0, 1.0] if family == "qwen2_5_vl" else None)


def test_a_video_needs_its_limits():
    encoder = tiny.encoder(videos=True, video_min_pixels=None, video_max_pixels=None)
    video = np.zeros((2, 56, 56, 3), np.uint8)
    with pytest.raises(UnreadableMediaError, match="give video_min_pixels and video_max_pixels"):
        encoder.encode({"messages": [user({"type": "video", "video": video}), says("A")]})


def test_the_same_image_from_every_holder(encoder, image, tmp_path):
    image.save(tmp_path / "a.png")
    data = tiny.png(image)
    inside = [
        image,
        data,
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        {"bytes": data, "path": None},
        {"path": str(tmp_path / "a.png")},
    ]
    samples = [encoder.encode({"messages": [user(IMAGE), says("A")], "images": [one]}) for one in inside]
    part = {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}}
    samples.append(encoder.encode({"messages": [user({"type": "image", "image": image}), says("A")]}))
    samples.append(encoder.encode({"messages": [user(part), says("A")]}))
    local = SampleEncoder(encoder.processor, tiny.adapter(), encoder.config, folder=tmp_path)
    samples.append(local.encode({"messages": [user(IMAGE), says("A")], "images": ["a.png"]}))
    for sample in samples[1:]:
        tiny.assert_same(samples[0], sample)


def test_pixel_limits_are_applied_and_required(image):
    large = tiny.picture(random.Random(1), 300, 400)
    for limit in (10_000, 50_000):
        encoder = tiny.encoder(max_pixels=limit)
        grid = encoder.encode({"messages": [user(IMAGE), says("A")], "images": [large]})["image_grid_thw"]
        assert limit * 0.7 < int(grid.prod()) * 14 * 14 <= limit
    with pytest.raises(ValueError, match=r"give min_pixels and max_pixels.*3136 and 1003520"):
        SampleEncoder(tiny.processor(), tiny.adapter())
    with pytest.raises(ValueError, match="min_pixels=9 exceeds max_pixels=4"):
        EncoderConfig(min_pixels=9, max_pixels=4)


def test_changed_settings_are_named_on_resume():
    state = json.loads(json.dumps(tiny.encoder().state_dict()))
    tiny.encoder().load_state_dict(state)
    with pytest.raises(ValueError, match="max_pixels was 50000, is 60000"):
        tiny.encoder(max_pixels=60_000).load_state_dict(state)
    with pytest.raises(ValueError, match="chat_template was"):
        tiny.encoder(template=tiny.TEMPLATE + " ").load_state_dict(state)
    with pytest.raises(ValueError, match=r"adapter was 'qwen2_5_vl', is 'qwen3_vl'; image_processor was .*14.*, is .*16"):
        tiny.encoder("qwen3_vl").load_state_dict(state)


def test_settings_that_no_sample_depends_on_may_change():
    tiny.encoder(ignored=("x",)).load_state_dict(tiny.encoder().state_dict())


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        ({"messages": [user(IMAGE), says("A")], "images": ["no.png"]}, UnreadableMediaError, "image 0: cannot read .*no.png"),
        ({"messages": [user(IMAGE), says("A")], "images": [b"junk"]}, UnreadableMediaError, "image 0: cannot read"),
        ({"messages": [user(IMAGE), says("A")], "images": [None]}, UnreadableMediaError, "image 0: the image is missing"),
        ({"messages": [user(IMAGE), says("A")]}, ConversationError, "message 0 places image 0, but the example has only 0"),
        ({"messages": [user(TEXT), says("A")], "images": [b"x"]}, ConversationError, "1 images.*media without placeholder"),
        ({"messages": [user(TEXT), user(TEXT), says("A")]}, ConversationError, "the conversation: roles must alternate"),
        ({"messages": []}, ConversationError, "must be a list of messages"),
        ({"messages": "{"}, ConversationError, "'messages' is text, but no JSON"),
        ({"messages": [{"content": "x"}]}, ConversationError, "message 0 must be a mapping with a role"),
        ({"messages": [user(TEXT), says("A", weight=-1)]}, ConversationError, "message 1 has weight -1"),
        ({"prompt": "x"}, ConversationError, "needs either 'messages' or 'text'"),
        ({"messages": [user(TEXT), says("A")], "source": "web"}, UndeclaredFieldError, "undeclared column 'source': rename it"),
        ({"messages": [user({"type": "video", "video": np.zeros((2, 56, 56, 3), np.uint8)}), says("A")]},
         UnreadableMediaError, "1 videos, but the processor has no video_processor"),
        ({"text": "no placeholder", "images": ["PICTURE"]}, MediaMismatchError, "1 images, but the text has 0 placeholders"),
    ],
)  # fmt: skip
def test_bad_input_is_named(encoder, example, error, message, image):
    if example.get("images") == ["PICTURE"]:
        example = {**example, "images": [image]}
    with pytest.raises(error, match=r"^example 7(?: |:|,).*" + message):
        encoder.encode(example, 7)


def test_a_damaged_image_is_named(encoder):
    data = tiny.png(tiny.picture(random.Random(3), 90, 90))
    with pytest.raises(UnreadableMediaError, match="example 0 \\('x'\\), image 0: cannot decode"):
        encoder.encode({"messages": [user(IMAGE), says("A")], "images": [data[: len(data) // 2]], "sample_id": "x"}, 0)


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_a_sample_above_max_length(policy):
    encoder = tiny.encoder(max_length=20, on_oversize=policy)
    example = {"messages": [user({"type": "text", "text": "x" * 50}), says("A")]}
    if policy == "error":
        with pytest.raises(OversizeSampleError, match=r"example 0: \d+ tokens exceed max_length=20"):
            encoder.encode(example)
    else:
        assert encoder.encode_list([example]) == [] and encoder.counts["oversize_dropped"] == 1


def test_documents_train_as_a_whole(encoder, image):
    sample = encoder.encode({"text": "See <|image_pad|> here", "images": [image]})
    assert trained(encoder, sample) == "See  here" and sample["mask_strategy"] == "text"


def test_placeholders_in_text_content(image):
    encoder = tiny.encoder(placeholders={"<image>": "image"})
    flat = encoder.encode({"messages": [{"role": "user", "content": "<image>What?"}, says("A")], "images": [image]})
    tiny.assert_same(flat, encoder.encode({"messages": [user(IMAGE, TEXT), says("A")], "images": [image]}))


def test_rows_of_tables_give_the_same_sample(encoder, image):
    """Absent keys filled with None, nested data as JSON text, tool calls with their arguments as text."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    plain = {"messages": [user(IMAGE, TEXT), says("", tool_calls=[call]), {"role": "tool", "content": "7"}, says("A")]}
    filled = [
        {
            "role": "user",
            "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?", "image": None}],
            "weight": None,
        },
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "7", "tool_calls": None},
        says("A", reasoning_content=None),
    ]
    wanted = encoder.encode({**plain, "images": [image]})
    tiny.assert_same(wanted, encoder.encode({"messages": filled, "images": [{"bytes": tiny.png(image)}]}))
    tiny.assert_same(wanted, encoder.encode({"messages": json.dumps(filled), "images": [image], "tools": "[]"}))


def test_declared_fields_travel(image):
    adapter = tiny.adapter()
    reward = Field(name="reward", kind="sample", dtype="float32", default=0.0)
    adapter = msgspec.structs.replace(adapter, fields=FieldSet((*adapter.fields, reward)))
    encoder = SampleEncoder(tiny.processor(), adapter, **tiny.LIMITS, ignored=("source",))
    sample = encoder.encode({"messages": [user(TEXT), says("A")], "reward": 2.5, "source": "web"})
    assert sample["reward"] == 2.5 and "source" not in sample
    assert float(encoder.prepare({"messages": [user(TEXT), says("A")], "reward": 2.5}).tensor("reward")) == 2.5


def test_a_tokenizer_alone_encodes_text():
    from ..masks.chat_formats import CHATML, with_template

    encoder = SampleEncoder(with_template(CHATML), adapter_for("text"))
    sample = encoder.encode({"messages": [user(TEXT), says([{"type": "text", "text": "A"}])]})
    assert trained(encoder, sample) == "A<|im_end|>"
    assert set(sample) == {"input_ids", "labels", "loss_weights", "mask_strategy"}


def test_the_plain_adapter_is_enough_where_nothing_is_recorded():
    encoder = tiny.encoder(record_strategy=False)
    prepare_sample(encoder.encode({"messages": [user(TEXT), says("A")]}), adapter=tiny.adapter())


def test_a_processor_with_other_media_tokens_is_refused():
    with pytest.raises(
        ValueError, match=r"writes '<\|image_pad\|>' as token \d+, the adapter 'qwen2_5_vl' expects image token 151655"
    ):
        SampleEncoder(tiny.processor(), adapter_for("qwen2_5_vl"), **tiny.LIMITS)


def test_ids_and_pixels_are_those_of_the_processor_alone(encoder):
    for one in tiny.examples(12, seed=5):
        if "<|image_pad|>" in json.dumps(one["messages"]):
            continue  # the processor takes a spelled placeholder for a real one
        messages = tiny_messages(one)
        wanted = encoder.processor.apply_chat_template(
            messages, tools=one["tools"], tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"images_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}},
        )  # fmt: skip
        sample = encoder.encode(one)
        assert torch.equal(sample["input_ids"], wanted["input_ids"][0])
        assert torch.equal(sample["mm_token_type_ids"], torch.as_tensor(wanted["mm_token_type_ids"])[0])
        if "pixel_values" in wanted:
            assert torch.equal(sample["pixel_values"], wanted["pixel_values"])
            assert torch.equal(sample["image_grid_thw"], wanted["image_grid_thw"])


def tiny_messages(one):
    """Return an example's messages with images inside their parts, as `apply_chat_template` wants them."""
    import io

    from PIL import Image

    images = iter(one["images"])
    out = []
    for message in one["messages"]:
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [
            {"type": "image", "image": Image.open(io.BytesIO(next(images)))} if p["type"] == "image" else p for p in content
        ]
        calls = [
            {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
            for c in message.get("tool_calls", [])
        ]
        out.append({**message, "content": parts, **({"tool_calls": calls} if calls else {})})
    return out


def test_docstrings():
    import doctest
    import importlib

    for name in ("conversation", "settings", "escaper", "sizes"):
        assert doctest.testmod(importlib.import_module(f"evenpack.collate.encoding.{name}")).failed == 0
