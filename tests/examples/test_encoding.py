"""Samples as the demo encodes them: special tokens, labels of the assistant alone, pictures that match their grids."""

import pytest
import torch
from demo.processing import IGNORED, MERGE_SIZE
from demo.tokenizer import END_OF_TURN, IMAGE_TOKEN, PADDING, SPECIAL_TOKENS, VISION_END, VISION_START, VOCAB_SIZE
from demo.train import MAX_TOKENS


def test_special_tokens_are_single_tokens(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END_OF_TURN, PADDING)


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x  # ok", "Grüße, 你好 \N{GRINNING FACE}", "  a\r\n\tb  ", "1234567890"]
)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token(tokenizer):
    assert len(tokenizer.encode("0123456789")) == 10


def test_two_trainings_agree(tokenizer):
    from demo.tokenizer import train_tokenizer

    assert train_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_other_ranks_load_what_the_first_saved(tokenizer, tmp_path):
    from demo.tokenizer import shared_tokenizer

    waits = []
    shared_tokenizer(tmp_path, 0, lambda: waits.append(0))
    loaded = shared_tokenizer(tmp_path, 1, lambda: waits.append(1))
    assert waits == [0, 1]
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.chat_template, loaded.eos_token) == (tokenizer.chat_template, tokenizer.eos_token)


def test_labels_are_the_answer_and_the_end_of_its_turn(encoded, tokenizer):
    for example, sample in encoded:
        labels = sample["labels"]
        answer = example.messages[-1]["content"][0]["text"]
        assert tokenizer.decode(labels[labels != IGNORED]) == answer + END_OF_TURN
        # Not shifted: a label stands where its own token stands.
        assert torch.equal(labels[labels != IGNORED], sample["input_ids"][labels != IGNORED])


def test_pictures_match_their_grids(encoded, tokenizer):
    token = tokenizer.convert_tokens_to_ids
    for example, sample in encoded:
        ids = sample["input_ids"]
        pictures = [part for part in example.messages[0]["content"] if part["type"] == "image"]
        assert ("pixel_values" in sample) == ("image_grid_thw" in sample) == bool(pictures)
        assert torch.equal(sample["mm_token_type_ids"], (ids == token(IMAGE_TOKEN)).long())
        assert int((ids == token(VISION_START)).sum()) == int((ids == token(VISION_END)).sum()) == len(pictures)
        if pictures:
            patches = sample["image_grid_thw"].prod(dim=1)
            assert len(patches) == len(pictures)
            assert int(patches.sum()) == len(sample["pixel_values"])
            assert int(patches.sum()) // MERGE_SIZE**2 == int((ids == token(IMAGE_TOKEN)).sum())


def test_samples_are_unpadded_rows_of_the_declared_types(encoded):
    for example, sample in encoded:
        length = len(sample["input_ids"])
        assert sample["sample_id"] == example.sample_id
        assert 0 < length <= MAX_TOKENS
        for name in ("input_ids", "labels", "mm_token_type_ids"):
            assert sample[name].shape == (length,) and sample[name].dtype == torch.int64
        if "pixel_values" in sample:
            assert sample["pixel_values"].dtype == torch.float32 and sample["pixel_values"].ndim == 2


def test_the_longest_document_fits_into_a_pack(processor, tokenizer):
    from demo.data import MAX_CHARACTERS, ChatExample, chat
    from demo.documents import load_documents
    from demo.processing import encode

    documents = load_documents(MAX_CHARACTERS)
    lengths = [len(ids) for ids in tokenizer([document.text for document in documents])["input_ids"]]
    longest = documents[lengths.index(max(lengths))]
    for answer in (longest.name, longest.summary):
        example = ChatExample(chat([], f"{longest.text}\n\nWhat does this document?", answer), "longest")
        assert len(encode(processor, example)["input_ids"]) <= MAX_TOKENS
