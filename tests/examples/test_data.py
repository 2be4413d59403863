"""Examples are a function of seed, rank and number; the evaluation's digits are never trained on."""

import numpy as np
import pytest
from demo.data import ChatExamples, held_out_examples
from demo.documents import load_documents
from demo.pictures import NUM_HELD_OUT, PHOTOS, Digits, package_file

NUM_READ = 40


def contents(examples: ChatExamples) -> list[list[object]]:
    """Every part of the first conversations, pictures as bytes."""
    out = []
    for index in range(NUM_READ):
        parts = [part for message in examples[index].messages for part in message["content"]]
        out.append([part["image"].tobytes() if part["type"] == "image" else part["text"] for part in parts])
    return out


def test_the_same_seed_and_rank_give_the_same_examples(examples):
    assert contents(ChatExamples(seed=0, rank=1, num_ranks=2)) == contents(examples)


@pytest.mark.parametrize(("seed", "rank"), [(1, 1), (0, 0)])
def test_another_seed_or_rank_gives_other_examples(examples, seed, rank):
    assert contents(ChatExamples(seed=seed, rank=rank, num_ranks=2)) != contents(examples)


def test_sample_ids_are_unique_over_the_ranks(examples):
    other = ChatExamples(seed=0, rank=0, num_ranks=2)
    ids = [source[index].sample_id for source in (examples, other) for index in range(NUM_READ)]
    assert len(set(ids)) == len(ids)


def test_the_mix_is_uneven_and_one_rank_has_one(examples):
    assert ChatExamples(seed=0, rank=0, num_ranks=2).document_share < examples.document_share
    assert ChatExamples(seed=0, rank=0, num_ranks=1).document_share > 0


def test_every_kind_is_read(encoded):
    assert {example.sample_id.partition("-")[0] for example, _ in encoded} == {"digits", "photo", "document"}


def test_held_out_digits_are_not_in_the_training_split():
    train, held_out = Digits("train"), Digits("held_out")
    assert len(held_out) == NUM_HELD_OUT == len(held_out_examples())
    assert len(train) + len(held_out) == 1797
    assert set(held_out.labels) == set(range(10))
    # A few digits of the data set were drawn alike; an overlap of the splits would show in most of them.
    trained_on = {train.image(index).tobytes() for index in range(len(train))}
    seen = np.mean([held_out.image(index).tobytes() in trained_on for index in range(len(held_out))])
    assert seen < 0.01


def test_digits_need_a_known_split():
    with pytest.raises(ValueError, match="'train' or 'held_out', got 'test'"):
        Digits("test")


@pytest.mark.parametrize(
    ("package", "error"), [("no_such_package", "is not installed"), ("sklearn", "has no file 'no/such/file'")]
)
def test_missing_data_is_named(package, error):
    with pytest.raises(ValueError, match=error):
        package_file(package, "no/such/file")


def test_every_photo_states_a_licence():
    assert all(photo.licence.startswith(("CC0", "CC BY", "public domain")) for photo in PHOTOS)
    assert all(package_file(photo.package, photo.path).is_file() for photo in PHOTOS)


def test_documents_are_long_tailed_and_cut():
    documents = load_documents(2000)
    lengths = np.array([len(document.text) for document in documents])
    assert len(documents) > 500 and lengths.max() == 2000
    assert np.percentile(lengths, 95) > 4 * np.percentile(lengths, 30)
    assert all(document.summary.strip(". ") for document in documents)


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("Return a copy. It is deep.", "Return a copy."),
        ("clip(a, low) -> array\n\nLimit the\nvalues.\n\nMore.", "Limit the values."),
        ("clip(a, low) -> array", "clip(a, low) -> array."),
    ],
)
def test_summary_is_the_first_sentence_behind_a_signature(text, summary):
    from demo.documents import Document

    assert Document("numpy.clip", text).summary == summary
