"""What is trained on: conversations about real pictures and documents, and a tiny Qwen2.5-VL for them.

Pictures, documents, tokenizer and processor are the demo's; the mix is wider: from one digit to several photos and to long
documents, so that lengths spread over a factor of 50, as those of image-text sets do.
"""

import copy
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from demo.data import chat, digit_chat
from demo.documents import load_documents
from demo.model import build_model
from demo.pictures import Digits, Photos
from demo.processing import encode, make_processor
from demo.tokenizer import train_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FAMILY = "qwen2_5_vl"
#: Kinds of conversations, and their shares on the first and on the last rank: shards differ, as real ones do.
KINDS = ("digits", "photos", "document")
SHARES = ((0.35, 0.45, 0.20), (0.25, 0.40, 0.35))
#: A photo more in a conversation has this chance, up to `MOST_PHOTOS`.
ANOTHER_PHOTO, MOST_PHOTOS = 0.45, 6
MAX_CHARACTERS = 2400
#: Sizes of the model in place of the demo's: wide enough that arithmetic, not Python, takes the time.
TEXT_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
VISION_SIZES = {"hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 256}
EMBEDDING_STD = 0.02


class Mix:
    """Conversations of one rank: number `i` is a function of (seed, rank, i)."""

    def __init__(self, seed: int, rank: int, num_ranks: int) -> None:
        self._seed, self._rank = seed, rank
        place = rank / max(num_ranks - 1, 1)
        self._shares = [first + (last - first) * place for first, last in zip(*SHARES, strict=True)]
        self._digits, self._photos, self._documents = Digits("train"), Photos(), load_documents(MAX_CHARACTERS)

    def __call__(self, index: int) -> list[dict[str, Any]]:
        """Return the messages of one conversation."""
        rng = random.Random(f"{self._seed}/{self._rank}/{index}")
        kind = rng.choices(KINDS, self._shares)[0]
        if kind == "document":
            document = rng.choice(self._documents)
            return chat([], f"{document.text}\n\nSum this up.", document.summary)
        if kind == "digits":
            chosen = [rng.randrange(len(self._digits)) for _ in range(rng.randint(1, 4))]
            images = [self._digits.image(index) for index in chosen]
            return digit_chat(images, "Which digits?", [self._digits.labels[index] for index in chosen])
        count = 1
        while count < MOST_PHOTOS and rng.random() < ANOTHER_PHOTO:
            count += 1
        drawn = [self._photos.draw(rng) for _ in range(count)]
        return chat([image for image, _ in drawn], "What do you see?", ", ".join(shows for _, shows in drawn))


class _Example:
    def __init__(self, messages: list[dict[str, Any]], sample_id: str) -> None:
        self.messages, self.sample_id = messages, sample_id


def make_samples(seed: int, rank: int, num_ranks: int, count: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the first `count` samples of a rank, encoded and not padded."""
    processor, mix = make_processor(FAMILY, tokenizer), Mix(seed, rank, num_ranks)
    return [encode(processor, _Example(mix(index), f"{rank}-{index}")) for index in range(count)]  # type: ignore[arg-type]


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    """Return the model, equal on every rank: transformers' class with its own attention."""
    small = build_model(FAMILY, tokenizer, seed)
    config = copy.deepcopy(small.config)
    for part, sizes in ((config.text_config, TEXT_SIZES), (config.vision_config, VISION_SIZES)):
        for name, value in sizes.items():
            setattr(part, name, value)
    text = config.text_config
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [8, 12, 12]}
    config._attn_implementation = "sdpa"
    model = type(small)(config)
    _initialise(model, seed)
    return model


@torch.no_grad()
def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Draw weights with one over the root of their inputs, which suits narrow layers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            std = EMBEDDING_STD if "embed_tokens" in name else parameter[0].numel() ** -0.5
            parameter.normal_(0.0, std, generator=generator)


__all__ = ["make_model", "make_samples", "train_tokenizer"]
