"""Blocks: what travels comes back the same, and nothing else is accepted."""

import os

import numpy as np
import pytest
import torch

from evenpack.core import CorruptBlockError, Sample, SampleLayout
from evenpack.core.fields import TENSOR_DTYPES, dtype_of
from evenpack.scheduler.stages.blocks import ALIGN, Block, block_checksum, read_block

#: Mutated blocks; a nightly run takes 100,000.
NUM_MUTATED = int(os.environ.get("EVENPACK_FUZZ_BLOCKS", "2000"))


def sample_of(values, *, shifted=False, sample_id="s", runs=(), seconds=()):
    """Return a sample with any values; blocks do not look into them."""
    layout = SampleLayout(
        num_tokens=5,
        runs=np.array(runs, np.int64).reshape(-1, 6),
        seconds=np.array(seconds, np.float32),
        num_spelled=2,
    )
    return Sample(values=values, layout=layout, shifted=shifted, sample_id=sample_id)


def written(sample, row=3, digest=77):
    """Return a sample's block."""
    block = Block.of(sample)
    buffer = torch.zeros(block.nbytes, dtype=torch.uint8)
    block.write(buffer.numpy(), row=row, digest=digest)
    return buffer


def tensors():
    """Return tensors of every dtype and of unusual shapes."""
    shapes = [(5,), (3, 1, 8), (0, 3), (), (16, 11)]
    for number, name in enumerate(TENSOR_DTYPES):
        shape = shapes[number % len(shapes)]
        raw = torch.randint(0, 2, (*shape, dtype_of(name).itemsize), dtype=torch.uint8)
        yield name, raw.reshape(-1).view(dtype_of(name)).reshape(shape)


def same(a, b):
    """Return whether two values are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b) if value.numel()]
        return a.dtype == b.dtype and a.shape == b.shape and (not raw or torch.equal(*raw))
    return a == b and type(a) is type(b)


@pytest.mark.parametrize("sample_id", [None, "a name", "\N{SNOWMAN}", 7, -(2**40)])
@pytest.mark.parametrize("shifted", [False, True])
def test_every_dtype_and_shape_travels(sample_id, shifted):
    values = {**dict(tensors()), "note": "text \N{SNOWMAN}", "rank": 3, "nothing": None, "share": 0.25}
    sample = sample_of(values, shifted=shifted, sample_id=sample_id, runs=[[0, 4, 1, 1, 4, 4]], seconds=[0.5])
    got = read_block(written(sample), row=3, digest=77)
    assert got.sample_id == sample_id and got.shifted == shifted
    assert got.layout.runs.tolist() == [[0, 4, 1, 1, 4, 4]] and got.layout.seconds.tolist() == [0.5]
    assert (got.layout.num_tokens, got.layout.num_spelled) == (5, 2)
    assert list(got.values) == [
        *(name for name in values if isinstance(values[name], torch.Tensor)),
        "note",
        "rank",
        "nothing",
        "share",
    ]
    assert all(same(got.values[name], value) for name, value in values.items())


def test_tensors_of_a_received_block_are_views():
    buffer = written(sample_of({"input_ids": torch.arange(5)}))
    got = read_block(buffer)
    first = buffer.data_ptr()
    assert first < got.tensor("input_ids").data_ptr() < first + buffer.numel()


def test_tensors_that_torch_moves_meanwhile_travel():
    """To send a tensor to another process, torch moves it into memory that both see."""
    value = torch.arange(1000)
    block = Block.of(sample_of({"x": value}))
    value.share_memory_()
    others = [torch.zeros(1000, dtype=torch.int64) for _ in range(10)]  # where it was
    buffer = torch.zeros(block.nbytes, dtype=torch.uint8)
    block.write(buffer.numpy(), row=0, digest=0)
    assert len(others) == 10 and torch.equal(read_block(buffer).tensor("x"), torch.arange(1000))


def test_tensors_that_are_not_contiguous_travel():
    values = {"a": torch.arange(12).reshape(3, 4).T, "b": torch.arange(10)[::2], "c": torch.full((3,), 1 + 2j).conj()}
    got = read_block(written(sample_of(values)))
    assert all(torch.equal(got.tensor(name), value) for name, value in values.items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b[:32], "at least"),
        (lambda b: b[:-16], "arrived"),
        (lambda b: torch.cat([b, b.new_zeros(16)]), "arrived"),
        (lambda b: torch.cat([b.new_tensor([0]), b[1:]]), "starts with"),
        (lambda b: torch.cat([b[:4], b.new_tensor([9]), b[5:]]), "wire version 9, this is version 2"),
        (lambda b: torch.cat([b[:-1], b[-1:] ^ 1]), "checksum"),
        (lambda b: torch.cat([b[:9], b.new_tensor([255]), b[10:]]), "header says"),
    ],
)
def test_a_changed_block_is_refused_by_name(change, text):
    with pytest.raises(CorruptBlockError, match=text):
        read_block(change(written(sample_of({"input_ids": torch.arange(5)}))).clone())


@pytest.mark.parametrize(("row", "digest", "text"), [(4, 77, "row 3 of the step, expected row 4"), (3, 78, "belongs to plan")])
def test_a_block_of_another_plan_is_refused(row, digest, text):
    with pytest.raises(CorruptBlockError, match=text):
        read_block(written(sample_of({"input_ids": torch.arange(5)})), row=row, digest=digest)


def resealed(raw):
    """Give a mutated block a checksum that fits, so that the reader goes on to parse it."""
    raw[32:40].view(np.uint64)[0] = block_checksum(raw.data)


def test_mutated_blocks_give_a_named_error_or_a_sample():
    """Also where the checksum fits, as by design of an attacker: never a crash, never more memory than the block."""
    rng = np.random.default_rng(0)
    sample = sample_of({"input_ids": torch.arange(5), "pixels": torch.ones(4, 3)}, runs=[[0, 4, 1, 1, 4, 4]], seconds=[0.0])
    original = written(sample)
    refused = 0
    for _ in range(NUM_MUTATED):
        buffer = original.clone()
        raw = buffer.numpy()
        places = rng.integers(0, len(raw), rng.integers(1, 5))
        raw[places] = rng.choice([0, 1, 127, 128, 255, int(rng.integers(256))], len(places))
        if rng.random() < 0.7:
            resealed(raw)
        try:
            got = read_block(buffer)
        except CorruptBlockError:
            refused += 1
            continue
        tensors = [value for value in got.values.values() if isinstance(value, torch.Tensor)]
        assert sum(value.numel() * value.element_size() for value in tensors) <= len(raw)
    assert 0 < refused < NUM_MUTATED


def test_every_change_of_one_byte_is_noticed():
    original = written(sample_of({"input_ids": torch.arange(5), "pixels": torch.ones(4, 3)}))
    for place in range(original.numel()):
        buffer = original.clone()
        buffer[place] ^= 1 << (place % 8)
        with pytest.raises(CorruptBlockError):
            read_block(buffer)


def test_sizes_are_aligned():
    block = Block.of(sample_of({"input_ids": torch.arange(5), "flag": torch.ones(3, dtype=torch.bool)}))
    assert block.nbytes % ALIGN == 0
