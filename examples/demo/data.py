"""Chat examples: questions about digits and photos, mixed with questions about documents of long-tailed length.

Every rank reads its own examples, and the ranks' mixes differ: the first ones see mostly small pictures, the last ones many
documents. Real shards are uneven in the same way, and it is what makes ranks wait for each other.
"""

import random
from typing import Any, NamedTuple

from PIL import Image

from .documents import load_documents
from .pictures import Digits, Photos

#: Share of documents in the mix of the first and of the last rank; the ranks between them lie between.
DOCUMENT_SHARE = (0.05, 0.20)
#: Share of photos, on every rank.
PHOTO_SHARE = 0.10
#: Digits per example, drawn uniformly.
DIGIT_COUNTS = (1, 1, 1, 2)
#: Documents are cut here; together with its question, the longest one has about 1300 tokens.
MAX_CHARACTERS = 2000

_DIGIT_QUESTIONS = ("Which digits?", "Read the digits.", "What is written here?")
_PHOTO_QUESTIONS = ("What is in this picture?", "What do you see?", "Describe the picture.")


class ChatExample(NamedTuple):
    """A conversation in the form that Hugging Face's chat templates take, pictures included."""

    messages: list[dict[str, Any]]
    sample_id: str


class ChatExamples:
    """The examples that one rank reads: number `i` is a function of (seed, rank, i) only.

    Args:
        seed: seed of the run.
        rank: rank that reads them.
        num_ranks: number of ranks, which sets how the mixes differ.
    """

    def __init__(self, seed: int, rank: int, num_ranks: int) -> None:
        self._seed, self._rank = seed, rank
        low, high = DOCUMENT_SHARE
        self.document_share = low + (high - low) * rank / max(num_ranks - 1, 1)
        self._digits, self._photos = Digits("train"), Photos()
        self._documents = load_documents(MAX_CHARACTERS)

    def __getitem__(self, index: int) -> ChatExample:
        rng = random.Random(f"{self._seed}/{self._rank}/{index}")
        kind = rng.random()
        if kind < self.document_share:
            name, messages = "document", self._document(rng)
        elif kind < self.document_share + PHOTO_SHARE:
            name, messages = "photo", self._photo(rng)
        else:
            name, messages = "digits", self._read_digits(rng)
        return ChatExample(messages, f"{name}-{self._rank}-{index}")

    def _read_digits(self, rng: random.Random) -> list[dict[str, Any]]:
        chosen = [rng.randrange(len(self._digits)) for _ in range(rng.choice(DIGIT_COUNTS))]
        images = [self._digits.image(index) for index in chosen]
        return digit_chat(images, rng.choice(_DIGIT_QUESTIONS), [self._digits.labels[index] for index in chosen])

    def _photo(self, rng: random.Random) -> list[dict[str, Any]]:
        image, shows = self._photos.draw(rng)
        return chat([image], rng.choice(_PHOTO_QUESTIONS), shows)

    def _document(self, rng: random.Random) -> list[dict[str, Any]]:
        document = rng.choice(self._documents)
        if rng.random() < 0.5:
            return chat([], f"{document.text}\n\nWhat does this document?", document.name)
        return chat([], f"{document.text}\n\nSum this up.", document.summary)


def held_out_examples() -> list[ChatExample]:
    """Return one question per held-out digit, in the words of the training."""
    digits = Digits("held_out")
    return [
        ChatExample(digit_chat([digits.image(index)], _DIGIT_QUESTIONS[0], [digits.labels[index]]), f"held-out-{index}")
        for index in range(len(digits))
    ]


def digit_chat(images: list[Image.Image], question: str, answer: list[int]) -> list[dict[str, Any]]:
    """Return a conversation about pictures of digits; the answer is one character, hence one token, per picture."""
    return chat(images, question, "".join(str(digit) for digit in answer))


def chat(images: list[Image.Image], question: str, answer: str) -> list[dict[str, Any]]:
    """Return a conversation of one question, its pictures first, and one answer."""
    content = [{"type": "image", "image": image} for image in images]
    return [
        {"role": "user", "content": [*content, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
