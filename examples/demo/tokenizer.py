"""A small byte-level BPE tokenizer with Qwen's special tokens and a ChatML template.

The released vocabulary has 152 thousand entries: a logit for each would cost more than the whole tiny model. This one is
trained in about a second on the standard library's sources, and behaves the same way otherwise.
"""

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

VOCAB_SIZE = 2048
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN, VISION_START, VISION_END, "<|vision_pad|>", IMAGE_TOKEN, VIDEO_TOKEN)

#: ChatML with vision blocks. Everything between the generation tags is the assistant's: its text and the end of its turn.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- for part in message.content %}{{- part.text }}{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

#: Words with the character before them, single digits (so that each digit of an answer is one token), punctuation, spaces.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
_CHARACTERS_PER_FILE = 20_000
_NUM_FILES = 150


def train_tokenizer() -> Qwen2Tokenizer:
    """Train the tokenizer; the result depends on the Python version only."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sources(), trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, unk_token=None, eos_token=None, pad_token=None)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def shared_tokenizer(folder: Path, rank: int, barrier: Callable[[], object]) -> Qwen2Tokenizer:
    """Return the same tokenizer on every rank: rank 0 trains and saves it, the others load it.

    Args:
        folder: where the tokenizer is saved.
        rank: this rank.
        barrier: waits until every rank has called it.
    """
    if rank == 0:
        tokenizer = train_tokenizer()
        tokenizer.save_pretrained(folder)
    barrier()
    return tokenizer if rank == 0 else Qwen2Tokenizer.from_pretrained(folder)


def _sources() -> Iterator[str]:
    """Yield the beginnings of the standard library's top-level modules."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_NUM_FILES]:
        yield file.read_text(encoding="utf-8", errors="replace")[:_CHARACTERS_PER_FILE]
