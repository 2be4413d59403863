"""Tokenizer, processors and samples of the demo."""

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from demo.tokenizer import train_tokenizer

    return train_tokenizer()


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def processor(family: str, tokenizer):
    from demo.processing import make_processor

    return make_processor(family, tokenizer)


@pytest.fixture(scope="session")
def examples():
    """The examples of the rank with the most documents of two."""
    from demo.data import ChatExamples

    return ChatExamples(seed=0, rank=1, num_ranks=2)


@pytest.fixture(scope="session")
def encoded(processor, examples):
    """Samples of every kind, each beside the example that it was made from."""
    from demo.processing import encode

    return [(example, encode(processor, example)) for example in map(examples.__getitem__, range(60))]
