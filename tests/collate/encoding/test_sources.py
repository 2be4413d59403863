"""One encoder for every source: Hugging Face datasets and Megatron-Energon give the same samples, field by field."""

import io
import json
import multiprocessing
import pickle
import tarfile

import pytest
import torch
from torch.utils.data import DataLoader

from evenpack.scheduler import PackingScheduler, SchedulerConfig
from evenpack.scheduler.sources import as_source

from . import tiny

datasets = pytest.importorskip("datasets")
energon = pytest.importorskip("megatron.energon")
COUNT = 200


@pytest.fixture(scope="module")
def examples():
    return tiny.examples(COUNT, seed=1)


@pytest.fixture(scope="module")
def encoder():
    return tiny.encoder()


@pytest.fixture(scope="module")
def expected(examples, encoder):
    return {one["sample_id"]: encoder.encode(one) for one in examples}


def as_table(examples):
    """Return a dataset with undecoded images, and nested columns as JSON text, as tables of conversations hold them."""
    rows = [{**one, "messages": json.dumps(one["messages"]), "tools": json.dumps(one["tools"])} for one in examples]
    columns = {name: [row[name] for row in rows] for name in ("messages", "tools", "images", "sample_id")}
    table = datasets.Dataset.from_dict(columns)
    return table.cast_column("images", datasets.List(datasets.Image()))


@pytest.fixture(scope="module")
def folder(examples, tmp_path_factory):
    """A crude Energon dataset of several shards."""
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    root = tmp_path_factory.mktemp("energon")
    for shard in range(4):
        with tarfile.open(root / f"shard{shard}.tar", "w") as tar:
            for one in examples[shard::4]:
                own = {"messages": one["messages"], "tools": one["tools"]}
                parts = {"json": json.dumps(own).encode(), **{f"{at}.png": data for at, data in enumerate(one["images"])}}
                for name, data in parts.items():
                    info = tarfile.TarInfo(f"{one['sample_id']}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    WebdatasetPreparator.prepare_dataset(
        root, [path.name for path in sorted(root.glob("*.tar"))], split_parts_ratio=[("train", 1.0)], tar_index_only=False
    )
    (root / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    return root


def energon_loader(folder, encoder, **settings):
    from evenpack.integrations.energon import EnergonTaskEncoder

    task = EnergonTaskEncoder(encoder, **{key: settings.pop(key) for key in ("pack", "read") if key in settings})
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=settings.pop("num_workers", 0))
    data = energon.get_train_dataset(
        folder,
        worker_config=config,
        **{"batch_size": None, "shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False, **settings},
        task_encoder=task,
    )
    return energon.get_savable_loader(data)


def compare(samples, expected):
    found = {sample["sample_id"]: sample for sample in samples}
    assert found.keys() == expected.keys()
    for name, sample in found.items():
        tiny.assert_same(expected[name], sample)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_energon_dataset_gives_the_same_samples(folder, encoder, expected, num_workers):
    compare(list(energon_loader(folder, encoder, num_workers=num_workers)), expected)


def test_energon_batches_are_lists_of_the_same_samples(folder, encoder, expected):
    compare([one for batch in energon_loader(folder, encoder, batch_size=7) for one in batch], expected)


def test_energon_resumes(folder, encoder):
    source = as_source(energon_loader(folder, encoder, shuffle_buffer_size=20))
    iterator = iter(source)
    for _ in range(30):
        next(iterator)
    state = pickle.loads(pickle.dumps(source.state_dict()))
    rest = [one["sample_id"] for one in iterator]
    resumed = as_source(energon_loader(folder, encoder, shuffle_buffer_size=20))
    resumed.load_state_dict(state)
    assert [one["sample_id"] for one in resumed] == rest and len(rest) == COUNT - 30


def test_energon_stops_at_a_sample_that_fails(folder):
    """Energon itself would print the error and go on without the sample."""
    from megatron.energon.errors import FatalSampleError

    with pytest.raises(FatalSampleError, match=r"example\d+.*tokens exceed max_length=5"):
        list(energon_loader(folder, tiny.encoder(max_length=5)))


def test_energon_passes_over_what_a_policy_drops(folder, expected):
    encoder = tiny.encoder(max_length=100, on_oversize="drop")
    kept = {name: one for name, one in expected.items() if len(one["input_ids"]) <= 100}
    compare(list(energon_loader(folder, encoder)), kept)
    assert 0 < len(kept) < COUNT and encoder.counts["oversize_dropped"] == COUNT - len(kept)


def test_a_stream_is_filtered_where_a_policy_drops(examples, expected):
    encoder = tiny.encoder(max_length=100, on_oversize="drop")
    stream = datasets.IterableDataset.from_generator(lambda: iter(examples))
    names = ["messages", "images", "tools"]
    rows = stream.map(encoder.encode_row, remove_columns=names).filter(lambda row: row["input_ids"] is not None)
    kept = [name for name, one in expected.items() if len(one["input_ids"]) <= 100]
    assert [row["sample_id"] for row in rows] == kept and encoder.counts["oversize_dropped"] == COUNT - len(kept)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 7}, {"num_workers": 2}, {"num_workers": 1, "batch_size": 7}])
def test_the_scheduler_counts_what_energon_passed_over(folder, expected, settings):
    """Up to the last sample that each worker encoded, however many processes count."""
    kept = sum(len(one["input_ids"]) <= 100 for one in expected.values())
    encoder = tiny.encoder(max_length=100, on_oversize="drop")
    loader = energon_loader(folder, encoder, **settings)
    config = SchedulerConfig(max_tokens=256, samples_per_step=8)
    with PackingScheduler(loader, config=config, adapter=encoder.adapter) as scheduler:
        num_samples = sum(step.num_samples for step in scheduler)
        dropped = scheduler.num_dropped
    assert kept - 8 < num_samples <= kept and COUNT - kept - 10 < dropped <= COUNT - num_samples


def test_energon_packs_a_batch(folder, encoder, expected):
    first = next(iter(energon_loader(folder, encoder, batch_size=5, pack={"align": 4})))
    wanted = encoder.collate([expected[name] for name in first.sample_ids], align=4)
    assert torch.equal(first.input_ids, wanted.input_ids) and torch.equal(first.loss_mask, wanted.loss_mask)


def test_samples_survive_worker_processes(folder, encoder):
    sample = next(iter(energon_loader(folder, encoder)))
    again = pickle.loads(pickle.dumps(sample))
    tiny.assert_same(sample, again)
    assert again.__restore_key__ == sample.__restore_key__ and again.__key__ == sample["sample_id"]


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({"text": "A document"}, "A document"),
        ({"image": "PNG", "caption": "A cat"}, "A cat<|im_end|>"),
        ({"image": "PNG", "context": "What?", "answers": ["A cat", "Cat"]}, "A cat<|im_end|>"),
    ],
)
def test_typed_energon_samples(fields, trained, encoder, examples):
    from evenpack.integrations.energon import example_of

    kinds = {"text": energon.TextSample, "caption": energon.CaptioningSample, "context": energon.VQASample}
    kind = next(kinds[name] for name in kinds if name in fields)
    image = next(one["images"][0] for one in examples if one["images"])
    values = {name: image if value == "PNG" else value for name, value in fields.items()}
    sample = encoder.encode(example_of(kind(__key__="k", __restore_key__=(), **values)))
    assert sample["sample_id"] == "k"
    assert encoder.tokenizer.decode(sample["labels"][sample["labels"] != -100]) == trained


def test_hugging_face_table_streaming_and_loader(examples, encoder, expected):
    table = as_table(examples)
    compare(map(encoder.encode, table), expected)
    compare(map(encoder.encode, table.to_iterable_dataset(num_shards=2)), expected)
    streamed = table.to_iterable_dataset().map(encoder.encode, remove_columns=["messages", "tools", "images"])
    compare(streamed, expected)
    loader = DataLoader(table, batch_size=8, collate_fn=encoder.encode_list)
    compare([one for batch in loader for one in batch], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_map(examples, encoder, expected):
    """A table holds numbers as lists; they are tensors again, exactly, once prepared. The first row has no image."""
    from evenpack.collate import prepare_sample

    table = as_table(examples[:10])
    mapped = table.map(encoder.encode_row, remove_columns=["messages", "tools", "images"], keep_in_memory=True)
    for row in mapped:
        given = {name: value for name, value in row.items() if value is not None}
        left = prepare_sample(given, adapter=encoder.adapter)
        right = prepare_sample(expected[row["sample_id"]], adapter=encoder.adapter)
        tiny.assert_same(dict(left.values), dict(right.values))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_loader_with_workers(examples, encoder, expected):
    loader = DataLoader(as_table(examples), batch_size=16, collate_fn=encoder.encode_list, num_workers=1)
    compare([one for batch in loader for one in batch], expected)


# --- the same samples through every scope ---


def lists_of(samples, size):
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def per_sample(scheduler, encoder):
    """Return every sample's tensors as they came out of packs."""
    out = {}
    with scheduler:
        for step in scheduler:
            for batch in step:
                rows = {
                    name: batch.unpack(getattr(batch, name)) for name in ("input_ids", "labels", "loss_mask", "position_ids")
                }
                grids = iter(batch.image_grid_thw.tolist() if batch.image_grid_thw is not None else [])
                pixels, at = batch.pixel_values, 0
                for number, name in enumerate(one for one in batch.sample_ids[: batch.num_samples]):
                    own = {key: values[number] for key, values in rows.items()}
                    features = int((own["input_ids"] == encoder.adapter.media_tokens["image"]).sum())
                    spelled = features - int(batch.unpack(batch.media_token_validity_mask)[number].sum())
                    left, rows_of = (features - spelled) * 4, []
                    while left > 0:
                        grid = next(grids)
                        count = grid[0] * grid[1] * grid[2]
                        rows_of.append(pixels[at : at + count])
                        at, left = at + count, left - count
                    own["pixels"] = torch.cat(rows_of) if rows_of else torch.zeros(0)
                    assert name not in out
                    out[name] = own
    return out


def test_every_scope_gives_the_same_tensors_per_sample(examples, encoder, expected):
    """In-batch packing, a rank's own buffer, and packing over the data-parallel group."""
    from evenpack.scheduler import PackingScheduler, ProcessGroups
    from evenpack.scheduler.testing import run_ranks

    def packed(rank, num_ranks, scope):
        samples = [expected[one["sample_id"]] for one in examples[rank:48:num_ranks]]
        source = lists_of(samples, 2) if scope == "microbatch" else samples
        size = {"num_microbatches": 2} if scope == "microbatch" else {"samples_per_step": 6}
        config = SchedulerConfig(max_tokens=2048, scope=scope, timeout=60.0, **size)
        groups = ProcessGroups.from_world()
        return per_sample(PackingScheduler(source, config=config, adapter=encoder.adapter, groups=groups), encoder)

    results = {}
    for scope in ("group", "rank", "microbatch"):
        found = {}
        for part in run_ranks(lambda rank, size, scope=scope: packed(rank, size, scope), 2):
            found.update(part)
        results[scope] = found
    assert results["group"].keys() == {one["sample_id"] for one in examples[:48]}
    for scope in ("rank", "microbatch"):
        assert results[scope].keys() == results["group"].keys()
        for name, own in results[scope].items():
            for key, value in own.items():
                assert torch.equal(value, results["group"][name][key]), (scope, name, key)
