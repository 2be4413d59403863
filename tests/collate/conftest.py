"""Samples of every kind, as plain mappings, and a slow packer to compare with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evenpack.collate import prepare_sample
from evenpack.core import Sample
from evenpack.models import adapter_for

IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653


def image_ids(t: int, h: int, w: int, token: int = IMAGE) -> list[int]:
    return [START, *[token] * (t * h * w // 4), END]


def raw_sample(family: str, parts: list, rng: np.random.Generator | None = None, **more) -> dict:
    """Return a raw sample from parts: an int is that many text tokens, ("image", t, h, w) or ("video", t, h, w) an item."""
    rng = rng or np.random.default_rng(0)
    ids: list[int] = []
    types: list[int] = []
    grids: dict[str, list] = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            new = rng.integers(1, 1000, part).tolist()
            ids, types = ids + new, types + [0] * part
            continue
        kind, t, h, w = part
        grids[kind].append([t, h, w])
        token, code = (IMAGE, 1) if kind == "image" else (VIDEO, 2)
        frames = [(1, h, w)] * t if kind == "video" and family.startswith("qwen3_vl") else [(t, h, w)]
        for index, frame in enumerate(frames):
            stamp = [500 + index] if len(frames) > 1 else []
            new = stamp + image_ids(*frame, token)
            ids += new
            types += [code if one == token else 0 for one in new]
    raw = {"input_ids": torch.tensor(ids), **more}
    if family != "text":
        raw |= {"mm_token_type_ids": torch.tensor(types)} | pixels(family, grids, rng)
    return raw


def pixels(family: str, grids: dict[str, list], rng: np.random.Generator) -> dict[str, torch.Tensor]:
    dim = adapter_for(family).patch_dim
    fields: dict[str, torch.Tensor] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            fields[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
            rows = sum(t * h * w for t, h, w in grids[kind])
            fields[name] = torch.from_numpy(rng.normal(size=(rows, 1)).astype(np.float32)).expand(rows, dim)
    if grids["video"] and family == "qwen2_5_vl":
        fields["second_per_grid_ts"] = torch.from_numpy(rng.uniform(0.2, 2.0, len(grids["video"])).astype(np.float32))
    return fields


def random_raw(family: str, rng: np.random.Generator, max_parts: int = 5, **more) -> dict:
    """Return a random sample: text, images and videos of small grids in any order, text at least once."""
    parts: list = []
    for _ in range(int(rng.integers(1, max_parts + 1))):
        kind = rng.choice(["text", "image", "video"]) if family != "text" else "text"
        if kind == "text":
            parts.append(int(rng.integers(1, 9)))
        else:
            h, w = (2 * rng.integers(1, 4, 2)).tolist()
            parts.append((str(kind), int(rng.integers(1, 4)) if kind == "video" else 1, h, w))
    parts.insert(int(rng.integers(0, len(parts) + 1)), int(rng.integers(1, 5)))
    raw = raw_sample(family, parts, rng, **more)
    length = len(raw["input_ids"])
    raw["labels"] = torch.where(torch.from_numpy(rng.random(length) < 0.3), -100, raw["input_ids"])
    raw["loss_weights"] = torch.from_numpy(rng.choice([0.0, 0.25, 1.0, 1.5], length).astype(np.float32))
    return raw


def random_samples(family: str, rng: np.random.Generator, count: int | None = None) -> list[Sample]:
    count = int(rng.integers(1, 6)) if count is None else count
    adapter = adapter_for(family)
    return [prepare_sample(random_raw(family, rng, sample_id=k), adapter=adapter) for k in range(count)]


def naive_rows(samples: list[Sample], adapter, align: int, pack_align: int) -> dict[str, list]:
    """Return the row fields of a pack, slot by slot in plain Python, from the samples' own fields."""
    row: dict[str, list] = {name: [] for name in ("input_ids", "labels", "loss_mask", "padding_mask", "types", "segment_ids")}
    real, padded = [0], [0]

    def slot(ids, label, weight, pad, kind, segment):
        for name, value in zip(row, (ids, label, weight, pad, kind, segment), strict=True):
            row[name].append(value)

    for number, sample in enumerate(samples):
        ids, labels = sample.tensor("input_ids").tolist(), sample.tensor("labels").tolist()
        weights, types = sample.tensor("loss_weights").tolist(), sample.layout.type_ids().tolist()
        for i, token in enumerate(ids):
            target = i if sample.shifted else i + 1
            label = labels[target] if target < len(ids) else -100
            slot(token, label, weights[target] if label != -100 else 0.0, False, types[i], number)
        while len(row["input_ids"]) % align:
            slot(adapter.pad_token_id, -100, 0.0, True, 0, number)
        real.append(real[-1] + len(ids))
        padded.append(len(row["input_ids"]))
    if len(row["input_ids"]) % pack_align:
        while len(row["input_ids"]) % pack_align:
            slot(adapter.pad_token_id, -100, 0.0, True, 0, len(samples))
        real.append(real[-1])
        padded.append(len(row["input_ids"]))
    return row | {"real": real, "padded": padded}


@pytest.fixture(scope="session")
def make():
    """The builders above: conftest cannot be imported by name."""
    return SimpleNamespace(
        raw=raw_sample,
        random_raw=random_raw,
        random_samples=random_samples,
        image_ids=image_ids,
        naive_rows=naive_rows,
        IMAGE=IMAGE,
        VIDEO=VIDEO,
        START=START,
        END=END,
    )
