"""`SampleEncoder.encode` against calling the processor alone, on the same conversations, in one run.

    python -m benchmarks.encode
    python -m benchmarks.encode --samples 200 --repeats 9

The processor alone renders, tokenizes and cuts pixels into patches; the encoder does that, finds the mask, opens files and
checks. Prints for each kind of sample and each mask strategy the median time of both and their ratio over alternating
repeats (CPU time of this process): at least 0.9 is the target.
"""

import argparse
import inspect
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

LIMITS = {"min_pixels": 4096, "max_pixels": 1_003_520}
#: Kinds of samples: images in the first question, turns, and characters of each question.
KINDS = {
    "text, 1 turn": (0, 1, 4000),
    "text, 6 turns": (0, 6, 700),
    "1 small image": (1, 1, 200),
    "1 photograph": (1, 2, 400),
    "4 photographs": (4, 3, 400),
}


def make_tools(max_pixels: int = LIMITS["max_pixels"]) -> tuple[Any, Any]:
    """Return a Qwen3-VL processor with a small vocabulary, and the adapter of that vocabulary."""
    from demo.processing import make_processor
    from demo.tokenizer import train_tokenizer

    from evenpack.models import adapter_for

    tokenizer = train_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    adapter = msgspec.structs.replace(
        adapter_for("qwen3_vl"),
        media_tokens={"image": ids("<|image_pad|>"), "video": ids("<|video_pad|>")},
        vision_start=ids("<|vision_start|>"),
        vision_end=ids("<|vision_end|>"),
        pad_token_id=ids("<|endoftext|>"),
    )
    return make_processor("qwen3_vl", tokenizer), adapter


def photographs() -> list[Any]:
    """Return pictures that come with matplotlib and scikit-image, without network; drawn ones where neither is there."""
    from PIL import Image

    found: list[Path] = []
    for name in ("skimage", "matplotlib"):
        try:
            package = __import__(name)
        except ImportError:
            continue
        root = Path(inspect.getfile(package)).parent
        found += sorted([*root.glob("data/*.png"), *root.glob("data/*.jpg"), *root.glob("mpl-data/sample_data/*.jpg")])
    pictures = [Image.open(path).convert("RGB") for path in found]
    return [one for one in pictures if min(one.size) >= 128] or [
        Image.effect_mandelbrot((512, 384), (-2, -1, 1, 1), 64).convert("RGB")
    ]


def documents(characters: int) -> list[str]:
    """Return pieces of the standard library's sources, about `characters` long each."""
    pieces: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        pieces += [text[at : at + characters] for at in range(0, len(text), characters)]
    return [piece for piece in pieces if piece.strip()]


def conversation(kind: str, rng: random.Random, texts: Sequence[str], pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of one example."""
    images, turns, characters = KINDS[kind]
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        parts = [{"type": "text", "text": rng.choice(texts)[:characters]}]
        if turn == 0:
            for _ in range(images):
                picture = rng.choice(pictures)
                parts.insert(0, {"type": "image", "image": picture.resize((160, 120)) if "small" in kind else picture})
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": rng.choice(texts)[: characters // 3]}]})
    return messages


def seconds_of(call: Callable[[Any], Any], items: Sequence[Any]) -> float:
    """Return the CPU seconds per item of a call."""
    started = time.process_time()
    for item in items:
        call(item)
    return (time.process_time() - started) / len(items)


def compare(encoder: Any, examples: Sequence[list[dict[str, Any]]], repeats: int) -> tuple[float, float, float]:
    """Return seconds per sample of the processor alone and of the encoder, and the median ratio of the two."""
    size = {"shortest_edge": LIMITS["min_pixels"], "longest_edge": LIMITS["max_pixels"]}

    def alone(messages: list[dict[str, Any]]) -> Any:
        return encoder.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"images_kwargs": {"size": size}}
        )

    def ours(messages: list[dict[str, Any]]) -> Any:
        return encoder.encode({"messages": messages})

    times: dict[str, list[float]] = {"alone": [], "ours": []}
    for call in (alone, ours):
        seconds_of(call, examples)
    for repeat in range(repeats):
        pair = {"alone": alone, "ours": ours}
        for name in sorted(pair, reverse=bool(repeat % 2)):
            times[name].append(seconds_of(pair[name], examples))
    ratios = [a / b for a, b in zip(times["alone"], times["ours"], strict=True)]
    return statistics.median(times["alone"]), statistics.median(times["ours"]), statistics.median(ratios)


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", choices=tuple(KINDS), default=tuple(KINDS))
    arguments = parser.parse_args()

    from evenpack.collate import SampleEncoder

    processor, adapter = make_tools()
    texts, pictures = documents(4000), photographs()
    print(f"{'kind':<16}{'strategy':<10}{'processor ms':>14}{'encoder ms':>12}{'ratio':>8}")
    for kind in arguments.kinds:
        rng = random.Random(kind)
        examples = [conversation(kind, rng, texts, pictures) for _ in range(arguments.samples)]
        for strategy in ("template", "prefix", "search"):
            encoder = SampleEncoder(processor, adapter, strategies=(strategy,), **LIMITS)
            alone, ours, ratio = compare(encoder, examples, arguments.repeats)
            print(f"{kind:<16}{strategy:<10}{alone * 1e3:>14.2f}{ours * 1e3:>12.2f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
