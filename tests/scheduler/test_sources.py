"""Sources resume where they stood: torch's loader, torchdata's, streaming datasets, Energon, plain iterables."""

import itertools
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from evenpack.scheduler.sources import (
    CountingSource,
    EnergonSource,
    HuggingFaceSource,
    IteratorSource,
    LoaderSource,
    Source,
    as_source,
)
from evenpack.scheduler.testing import run_ranks

NUM = 40


class Own:
    """A source of the user's own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < NUM:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(**settings):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(range(NUM)), **settings)


def streaming(buffer=0):
    import datasets

    dataset = datasets.Dataset.from_dict({"x": list(range(NUM))}).to_iterable_dataset(num_shards=4)
    return dataset.shuffle(seed=3, buffer_size=buffer) if buffer else dataset


def seeded(**settings):
    return DataLoader(list(range(NUM)), generator=torch.Generator().manual_seed(5), **settings)


def distributed():
    sampler = DistributedSampler(list(range(NUM)), num_replicas=2, rank=1, shuffle=True)
    return DataLoader(list(range(NUM)), sampler=sampler, batch_size=3)


def own_batches():
    generator = torch.Generator().manual_seed(3)
    sampler = torch.utils.data.RandomSampler(range(NUM), generator=generator)
    return DataLoader(list(range(NUM)), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))


def own_batches_distributed():
    sampler = DistributedSampler(list(range(NUM)), num_replicas=2, rank=1, shuffle=True)
    return DataLoader(list(range(NUM)), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))


SOURCES = {
    "loader, own batch sampler": own_batches,
    "loader, own batch sampler, distributed": own_batches_distributed,
    "list": lambda: list(range(NUM)),
    "own": Own,
    "loader": lambda: DataLoader(list(range(NUM)), batch_size=4, shuffle=True),
    "loader, own generator": lambda: seeded(batch_size=None, shuffle=True),
    "loader, workers": lambda: seeded(batch_size=3, shuffle=True, num_workers=2),
    "loader, persistent workers": lambda: seeded(batch_size=3, shuffle=True, num_workers=1, persistent_workers=True),
    "loader, distributed sampler": distributed,
    "stateful loader": lambda: stateful(batch_size=3, shuffle=True),
    "stateful loader, workers": lambda: stateful(batch_size=None, num_workers=2),
    "streaming": streaming,
    "streaming, shuffle buffer": lambda: streaming(buffer=16),
}


def values(items):
    """Return items as plain data."""
    return [item.tolist() if isinstance(item, torch.Tensor) else item for item in items]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("read", [0, 1, 7, None])
def test_a_resumed_source_goes_on_where_it_stood(name, read):
    """Also in the next epoch, and for a state taken at the end of one (D8)."""
    torch.manual_seed(0)
    source = as_source(SOURCES[name]())
    assert isinstance(source, Source)
    iterator = iter(source)
    list(itertools.islice(iterator, read))
    state = source.state_dict()
    outside = torch.get_rng_state()
    rest = values(iterator) if read is not None else None
    torch.set_rng_state(outside)
    following = values(source)

    torch.manual_seed(1)
    resumed = as_source(SOURCES[name]())
    resumed.load_state_dict(json.loads(json.dumps(state)) if name in ("list", "own") else state)
    torch.set_rng_state(outside)
    if read is not None:
        assert values(resumed) == rest
        torch.set_rng_state(outside)
    assert values(resumed) == following


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ([1], CountingSource),
        (iter([1]), IteratorSource),
        ((x for x in [1]), IteratorSource),
        (DataLoader([1]), LoaderSource),
    ],
)
def test_adapters(source, kind):
    assert type(as_source(source)) is kind


def test_streaming_dataset_is_recognised():
    assert type(as_source(streaming())) is HuggingFaceSource


def test_what_is_no_iterable_is_refused():
    with pytest.raises(TypeError, match="must be iterable, got int"):
        as_source(3)


class Ragged(torch.utils.data.Dataset):
    """A map-style dataset whose samples differ in length."""

    def __init__(self, as_list: bool = False) -> None:
        self.as_list = as_list

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index >= 4:
            raise IndexError(index)
        return {"input_ids": [0] * (3 + index) if self.as_list else torch.arange(3 + index)}


@pytest.mark.parametrize(
    ("settings", "epochs", "warns"),
    [
        ({}, [0, 0, 0], [1]),  # once
        ({}, [0, 1, 1], [2]),
        ({}, [0, 1, 2], []),
        ({}, [3, 0, 3], []),
        ({"shuffle": False}, [0, 0], []),
        ({"rank": 1}, [0, 0], []),  # one rank says it for all
    ],
)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_sampler_whose_epoch_is_never_set(settings, epochs, warns, batch_size):
    sampler = DistributedSampler(range(NUM), **{"num_replicas": 2, "rank": 0, **settings})
    source = as_source(DataLoader(range(NUM), batch_size=batch_size, sampler=sampler, collate_fn=lambda items: items))
    found = []
    for number, epoch in enumerate(epochs):
        sampler.set_epoch(epoch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert list(source)
        found += [number for one in caught if "call sampler.set_epoch(epoch) before each epoch" in str(one.message)]
    assert found == warns


def test_a_resumed_epoch_is_the_one_of_before():
    sampler = DistributedSampler(range(NUM), num_replicas=2, rank=0)
    source = as_source(DataLoader(range(NUM), batch_size=None, sampler=sampler))
    next(iter(source))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.load_state_dict(source.state_dict())
        list(source)


def test_a_loader_that_accelerate_prepared_is_refused():
    """It repeats samples and talks to other ranks while it reads; it used to fail on a missing `dl_state_dict`."""
    accelerate = pytest.importorskip("accelerate")

    def fn(rank, num_ranks):  # in a process that ends: accelerate remembers the ranks that it saw
        accelerator = accelerate.Accelerator(cpu=True)
        loader = DataLoader(range(8), batch_size=2, collate_fn=list)
        prepared = accelerator.prepare(loader)
        for one in (prepared, accelerator.skip_first_batches(prepared, 1)):
            with pytest.raises(TypeError, match=r"DataLoader\w* of accelerate .*leave the loader out.*DistributedSampler"):
                as_source(one)
        return type(as_source(loader)).__name__

    assert run_ranks(fn, 2, backend="gloo") == ["LoaderSource"] * 2


def test_a_map_style_dataset_without_a_loader_is_refused():
    with pytest.raises(TypeError, match=r"map-style dataset Ragged: wrap it, DataLoader\(dataset, batch_size=None"):
        as_source(Ragged())


@pytest.mark.parametrize(("as_list", "workers"), [(False, 0), (False, 1), (True, 0)])
def test_samples_that_the_loader_would_stack(as_list, workers):
    """torch says which sizes differ; that they need no stacking at all, only the source can say."""
    loader = DataLoader(Ragged(as_list), batch_size=2, num_workers=workers)
    with pytest.raises(RuntimeError, match=r"(?s)equal size.*batch_size=None, or a collate_fn"):
        list(as_source(loader))


def test_an_error_of_the_dataset_is_left_as_it_is():
    def stack(batch):
        return torch.stack([one["input_ids"] for one in batch])

    with pytest.raises(RuntimeError, match=r"at entry 1$"):
        list(as_source(DataLoader(Ragged(), batch_size=2, collate_fn=stack)))


def test_reading_does_not_disturb_the_random_state_of_the_training_loop():
    torch.manual_seed(0)
    source = as_source(DataLoader(list(range(NUM)), shuffle=True))
    list(itertools.islice(iter(source), 5))
    state = source.state_dict()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    resumed = as_source(DataLoader(list(range(NUM)), shuffle=True))
    resumed.load_state_dict(state)
    list(iter(resumed))
    assert torch.equal(torch.get_rng_state(), before)


ENERGON = """
import sys, json, io, tarfile
from pathlib import Path
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset, DefaultTaskEncoder, TextSample
from evenpack.scheduler.sources import as_source

folder = Path(sys.argv[1])
def loader():
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(folder, worker_config=config, batch_size=1, shuffle_buffer_size=4, max_samples_per_sequence=2)
    return get_savable_loader(dataset)

source = as_source(loader())
iterator = iter(source)
for _ in range(5): next(iterator)
state = source.state_dict()
rest = [next(iterator).__key__ for _ in range(8)]
resumed = as_source(loader())
resumed.load_state_dict(state)
iterator = iter(resumed)
again = [next(iterator).__key__ for _ in range(8)]
print(json.dumps([type(source).__name__, rest == again, len(set(map(str, rest)))]))
"""


def energon_dataset(folder):
    """Write a small Energon dataset of text: tar shards, their index, and the two files that describe them."""
    import io
    import tarfile

    from megatron.energon.flavors.base_dataset import __name__ as _  # noqa: F401
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shard{shard}.tar", "w") as tar:
            for index in range(6):
                data = f"text {shard} {index}".encode()
                info = tarfile.TarInfo(f"{shard}-{index}.txt")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    WebdatasetPreparator.prepare_dataset(
        folder, [path.name for path in sorted(folder.glob("*.tar"))], split_parts_ratio=[("train", 1.0)], tar_index_only=False
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    )


def test_energon_loader_resumes(tmp_path):
    energon_dataset(tmp_path / "data")
    result = subprocess.run(
        [sys.executable, "-c", ENERGON, str(tmp_path / "data")], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1])[:2] == [EnergonSource.__name__, True]
