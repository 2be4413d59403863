"""Lengths from files of every format, and what is said of wrong ones."""

import json

import numpy as np
import pytest

from evenpack.cli.what_if.lengths import read_samples

LENGTHS = [12, 7, 300, 7, 41]
IDS = [list(range(length)) for length in LENGTHS]
GRIDS = [[[1, 4, 6]], [], [[1, 2, 2], [2, 4, 4]], None, []]


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def write_parquet(path, columns):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table(columns), path, row_group_size=2)


def write_dataset(path, columns, order=None):
    from datasets import Dataset

    table = Dataset.from_dict(columns)
    (table if order is None else table.select(order)).save_to_disk(path)


FORMATS = {
    "numbers.txt": lambda path: path.write_text("12\n7\n\n300\n7\n41\n"),
    "numbers.jsonl": lambda path: write_jsonl(path, LENGTHS),
    "whole.json": lambda path: path.write_text(json.dumps([float(length) for length in LENGTHS])),
    "objects.jsonl": lambda path: write_jsonl(path, [{"text": "x", "length": length} for length in LENGTHS]),
    "ids.jsonl": lambda path: write_jsonl(path, [{"input_ids": ids} for ids in IDS]),
    "bare.csv": lambda path: path.write_text("12\n7\n300\n7\n41\n"),
    "header.csv": lambda path: path.write_text('name,num_tokens\n"a,b",12\nb,7\nc,300\nd,7\ne,41.0\n'),
    "header.tsv": lambda path: path.write_text("name\ttokens\na\t12\nb\t7\nc\t300\nd\t7\ne\t41\n"),
    "ints.parquet": lambda path: write_parquet(path, {"other": ["x"] * 5, "num_tokens": LENGTHS}),
    "lists.parquet": lambda path: write_parquet(path, {"input_ids": IDS}),
    "saved": lambda path: write_dataset(path, {"input_ids": IDS, "text": ["x"] * 5}),
    "chosen": lambda path: write_dataset(path, {"length": [1, *LENGTHS]}, order=[1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_lengths(name, tmp_path):
    FORMATS[name](tmp_path / name)
    samples = read_samples(tmp_path / name)
    assert samples.tokens.dtype == np.int64
    assert samples.tokens.tolist() == LENGTHS
    assert samples.grids is None and samples.vision_tokens is None


@pytest.mark.parametrize(
    "name, write",
    [
        ("g.jsonl", lambda path: write_jsonl(path, [{"tokens": 400, "image_grid_thw": grids} for grids in GRIDS])),
        ("g.parquet", lambda path: write_parquet(path, {"tokens": [400] * 5, "image_grid_thw": GRIDS})),
        ("g", lambda path: write_dataset(path, {"tokens": [400] * 5, "image_grid_thw": GRIDS})),
        ("g.csv", lambda path: path.write_text(
            "tokens,image_grid_thw\n" + "".join(f'400,"{json.dumps(grids) if grids else ""}"\n' for grids in GRIDS))),
    ],
)  # fmt: skip
def test_grids_of_every_format(name, write, tmp_path):
    write(tmp_path / name)
    samples = read_samples(tmp_path / name)
    assert samples.grids == [[(1, 4, 6)], [], [(1, 2, 2), (2, 4, 4)], [], []]


def test_vision_tokens_and_columns_by_name(tmp_path):
    rows = [{"n": 10, "v": 4}, {"n": 20}, {"n": 30, "v": 0}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    samples = read_samples(tmp_path / "a.jsonl", column="n", vision_tokens="v")
    assert samples.tokens.tolist() == [10, 20, 30] and samples.vision_tokens.tolist() == [4, 0, 0]


WRONG = [
    ("a.txt", "", None, "holds no samples"),
    ("a.txt", "5\n\n0\n", None, r"a.txt, line 3: a length is a whole number from 1 to 2,147,483,647, got 0"),
    ("a.jsonl", "5\n-3\n", None, "line 2: .* got -3"),
    ("a.jsonl", "5\n2.5\n", None, r"line 2: .* got 2\.5"),
    ("a.jsonl", "5\ntrue\n", None, "line 2: .* got True"),
    ("a.jsonl", "5\nnull\n", None, "line 2: .* got None"),
    ("a.jsonl", '5\n"abc"\n', None, "line 2: .* got 'abc'"),
    ("a.jsonl", "5\n99999999999\n", None, "line 2: .* got 99999999999"),
    ("a.txt", "5\nabc\n", None, "a.txt, line 2: a length is a whole number, got 'abc'"),
    ("a.jsonl", "5\n{broken\n", None, "a.jsonl, line 2: no JSON"),
    ("a.jsonl", '{"tokens": 5}\n{"text": ""}\n', None, "line 2: no 'tokens'"),
    ("a.jsonl", '{"tokens": 5}\n7\n', None, "line 2: no 'tokens'"),
    ("a.jsonl", '{"tokens": []}\n', None, "line 1: .* got 0|line 1: .* got \\[\\]"),
    ("a.jsonl", '{"a": 5, "b": 1}\n', None, "no column of lengths among a, b: name one with --column"),
    ("a.jsonl", '{"a": 5, "b": 1}\n', "c", "has no column 'c'; it has a, b"),
    ("a.jsonl", "5\n", "c", "has no column 'c'; it has bare numbers"),
    ("a.json", "[5, 0]", None, "a.json, entry 1: .* got 0"),
    ("a.jsonl", '{"tokens": 5, "image_grid_thw": [[1, 2]]}\n', None, r"line 1: grids are .* got \[\[1, 2\]\]"),
    ("a.jsonl", '{"tokens": 5, "image_grid_thw": [[1, 0, 2]]}\n', None, r"line 1: grids are .* got \[\[1, 0, 2\]\]"),
    ("a.jsonl", '{"tokens": 5, "vision_tokens": 6}\n', None, "line 1: 6 vision tokens in a sample of 5 tokens"),
    ("a.csv", "name,tokens\na,5\nb,x\n", None, "a.csv, line 3: .* got 'x'"),
    ("a.csv", "name,tokens\na,5\nb\n", None, "line 3: 1 values, and the header has 2"),
    ("a.csv", "tokens\n5\nnan\n", None, "line 3: .* got 'nan'"),
    ("a.csv", "tokens\n", None, "holds no samples"),
    ("a.parquet", "not parquet", None, "a.parquet: "),
    ("a.bin", "5", None, "of no known format; lengths come as .jsonl"),
]


@pytest.mark.parametrize("name, text, column, message", WRONG)
def test_what_is_wrong_is_said_with_its_place(name, text, column, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_samples(tmp_path / name, column=column)


def test_wrong_folders_and_values_in_arrow(tmp_path):
    with pytest.raises(ValueError, match="no file or folder"):
        read_samples(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a saved"):
        read_samples(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits.*train"):
        read_samples(tmp_path)
    write_parquet(tmp_path / "a.parquet", {"tokens": [3, 4, None, 0]})
    with pytest.raises(ValueError, match=r"row 2: .* got None"):
        read_samples(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", {"tokens": [3, 4, 5, 0]})
    with pytest.raises(ValueError, match=r"row 3: .* got 0"):
        read_samples(tmp_path / "b.parquet")
