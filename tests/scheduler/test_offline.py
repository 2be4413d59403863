"""The offline index: exact counts, planned epochs, resuming, restarting, and everything that no longer fits is named."""

import itertools
import json

import numpy as np
import pytest

from evenpack.core import OversizeSampleError, SampleError
from evenpack.scheduler import OfflineConfig, OfflineIndex
from evenpack.scheduler.offline import JsonLines, open_dataset
from evenpack.scheduler.offline.permutation import Permutation
from evenpack.scheduler.offline.plan import cut_epoch

from ..collate.encoding import tiny

COUNT = 60


@pytest.fixture(scope="module")
def dataset():
    return tiny.examples(COUNT, seed=2)


@pytest.fixture(scope="module")
def encoder():
    return tiny.encoder()


@pytest.fixture(scope="module")
def samples(dataset, encoder):
    return [encoder.encode(one) for one in dataset]


@pytest.fixture(scope="module")
def index(dataset, encoder, tmp_path_factory):
    return OfflineIndex.build(tmp_path_factory.mktemp("index"), dataset, encoder, chunk=16, progress=False)


def config(**settings):
    size = {} if "tokens_per_step" in settings else {"samples_per_step": 7}
    return OfflineConfig(**{"max_tokens": 1024, "num_microbatches": 2, **size, **settings})


def source(index, dataset, encoder, rank=0, num_ranks=2, **settings):
    return index.source(dataset, encoder, config(**settings), rank=rank, num_ranks=num_ranks)


def names(packs):
    return [[sample["sample_id"] for sample in pack] for pack in packs]


def test_counts_are_those_of_the_encoded_samples(index, samples):
    assert index.tokens(range(COUNT)).tolist() == [len(sample["input_ids"]) for sample in samples]
    for number, sample in enumerate(samples):
        assert index.grids(number) == [tuple(grid) for grid in sample.get("image_grid_thw", np.zeros((0, 3))).tolist()]
    assert index.num_media == sum(len(sample.get("image_grid_thw", [])) for sample in samples)
    assert index.num_tokens == sum(len(sample["input_ids"]) for sample in samples)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_build_the_same_index(index, dataset, encoder, workers, tmp_path):
    built = OfflineIndex.build(tmp_path / "x", dataset, encoder, workers=workers, chunk=7, progress=False)
    assert built.tokens(range(COUNT)).tolist() == index.tokens(range(COUNT)).tolist()
    assert [built.grids(n) for n in range(COUNT)] == [index.grids(n) for n in range(COUNT)]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "grid_starts.npy",
        "grids.npy",
        "index.json",
        "tokens.npy",
    ]


class Failing(list):
    """A dataset that fails at one example, until it is mended."""

    broken = True
    reads = 0

    def __getitem__(self, place):
        if self.broken and place == 40:
            raise OSError("disk")
        Failing.reads += 1
        return list.__getitem__(self, place)


def test_a_build_that_broke_off_goes_on(index, dataset, encoder, tmp_path, monkeypatch):
    failing = Failing(dataset)
    monkeypatch.setattr("evenpack.scheduler.offline.files.PROBES", 1)
    with pytest.raises(OSError, match="disk"):
        OfflineIndex.build(tmp_path, failing, encoder, chunk=10, progress=False)
    with pytest.raises(ValueError, match="no offline index"):
        OfflineIndex.open(tmp_path)
    failing.broken, Failing.reads = False, 0
    with pytest.raises(ValueError, match=r"holds parts of another index \(max_pixels was 50000, is 60000\)"):
        OfflineIndex.build(tmp_path, failing, tiny.encoder(max_pixels=60_000), chunk=10, progress=False)
    with pytest.raises(ValueError, match="chunk was 10, is 20"):
        OfflineIndex.build(tmp_path, failing, encoder, chunk=20, progress=False)
    Failing.reads = 0
    built = OfflineIndex.build(tmp_path, failing, encoder, chunk=10, progress=False)
    assert Failing.reads < 30  # 20 examples in two parts, and the probes
    assert built.tokens(range(COUNT)).tolist() == index.tokens(range(COUNT)).tolist()
    assert len(OfflineIndex.build(tmp_path, failing, encoder, progress=False)) == COUNT  # opened, not built


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(encoder=lambda: tiny.encoder(min_pixels=4000)), "min_pixels was 3136, is 4000"),
        (dict(encoder=lambda: tiny.encoder(template=tiny.TEMPLATE + "x")), "chat_template was"),
        (dict(encoder=lambda: tiny.encoder("qwen3_vl")), "adapter was 'qwen2_5_vl', is 'qwen3_vl'"),
        (dict(dataset=lambda: tiny.examples(COUNT - 1, seed=2)), "dataset: num_examples was 60, is 59"),
        (dict(dataset=lambda: tiny.examples(COUNT, seed=3)), "dataset: fingerprint was"),
    ],
)
def test_what_changed_is_named(index, change, message):
    with pytest.raises(ValueError, match=message):
        OfflineIndex.open(index.folder, **{name: make() for name, make in change.items()})


def test_a_changed_tokenizer_is_named(index):
    import copy

    encoder = tiny.encoder()
    encoder.tokenizer = encoder.processor.tokenizer = copy.deepcopy(encoder.tokenizer)
    encoder.tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="tokenizer was"):
        OfflineIndex.open(index.folder, encoder=encoder)


def test_an_example_that_changed_since_is_named(index, dataset, encoder):
    changed = list(dataset)
    place = 13
    changed[place] = {**changed[place], "messages": [*changed[place]["messages"], {"role": "user", "content": "more"}]}
    planner = index.planner(config(), encoder.adapter, num_ranks=1)
    from evenpack.scheduler.offline.source import OfflineSource

    with pytest.raises(SampleError, match=r"example 13 has \d+ tokens, the index says \d+: the dataset has changed"):
        list(OfflineSource(planner, changed, encoder, rank=0))


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_an_example_that_cannot_be_encoded(dataset, encoder, policy, tmp_path):
    bad = [*dataset[:5], {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["no.png"]}]
    if policy == "error":
        for workers in (0, 1):
            with pytest.raises(SampleError, match="example 5, image 0: cannot read the image"):
                OfflineIndex.build(tmp_path, bad, encoder, workers=workers, progress=False)
        return
    index = OfflineIndex.build(tmp_path, bad, encoder, on_error="skip", progress=False)
    assert (len(index), index.num_skipped, index.tokens([5]).tolist()) == (6, 1, [0])
    packs = list(index.source(bad, encoder, config(samples_per_step=3), rank=0, num_ranks=1))
    assert sorted(itertools.chain(*names(packs))) == sorted(one["sample_id"] for one in dataset[:5])


def test_samples_above_max_length(dataset, tmp_path):
    with pytest.raises(OversizeSampleError, match="tokens exceed max_length=100"):
        OfflineIndex.build(tmp_path / "a", dataset, tiny.encoder(max_length=100), progress=False)
    encoder = tiny.encoder(max_length=100, on_oversize="drop")
    index = OfflineIndex.build(tmp_path / "b", dataset, encoder, progress=False)
    assert index.num_dropped == sum(encoder.encode(one) is None for one in dataset) > 0


# --- planned epochs ---


@pytest.mark.parametrize("settings", [{}, {"tokens_per_step": 1500}, {"shuffle": False}, {"num_microbatches": None}])
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_every_sample_is_in_one_pack_of_one_rank(index, dataset, encoder, settings, sync, samples):
    packs = [list(source(index, dataset, encoder, rank, 2, sync=sync, **settings)) for rank in (0, 1)]
    assert len(packs[0]) == len(packs[1])
    found = [name for rank in packs for pack in names(rank) for name in pack]
    assert sorted(found) == sorted(one["sample_id"] for one in dataset)
    lengths = {sample["sample_id"]: len(sample["input_ids"]) for sample in samples}
    assert max(sum(lengths[name] for name in pack) for rank in packs for pack in names(rank)) <= 1024
    for sample in packs[0][0]:
        tiny.assert_same(samples[[one["sample_id"] for one in dataset].index(sample["sample_id"])], sample)


LENGTHS = [0, 90, 5, 6, 0, 7, 90, 8, 9, 10, 11, 0, 3, 90, 90]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # Left out and dropped ones take no place of a step; the last ones belong to the step before them.
        (dict(samples_per_step=2), [[5, 6, 7, 8], [9, 10, 11, 3]]),
        (dict(samples_per_step=3), [[5, 6, 7, 8, 9, 10], [11, 3]]),
        (dict(samples_per_step=2, oversize="error"), [[90, 5, 6, 7], [90, 8, 9, 10], [11, 3, 90, 90]]),
        (dict(tokens_per_step=18), [[5, 6, 7], [8, 9], [10], [11, 3]]),
        (dict(tokens_per_step=7), [[5], [6], [7], [8], [9], [10], [11], [3]]),
        (dict(samples_per_step=2, align=16), [[5, 6, 7, 8], [9, 10, 11, 3]]),
        (dict(samples_per_step=2, align=16, max_tokens=15), []),
        (dict(samples_per_step=2, max_tokens=2), []),
    ],
)
@pytest.mark.parametrize("repeat", [1, 300])
def test_steps_are_cut_of_what_is_left(settings, steps, repeat):
    config = OfflineConfig(**{"max_tokens": 16, "oversize": "drop", "shuffle": False, **settings})
    lengths = np.array(LENGTHS[:-1] + [90] * repeat)  # a long run of dropped ones, beyond what is looked at together
    found = list(cut_epoch(lengths.__getitem__, len(lengths), config, num_ranks=2, epoch=0))
    if config.oversize == "drop":
        assert [lengths[step.samples].tolist() for step in found] == steps
    else:
        assert [lengths[step.samples].tolist() for step in found][:2] == steps[:2]
    assert [step.start for step in found] == [0, *(step.stop for step in found)][: len(found)]
    if found:
        assert found[-1].stop == len(lengths)
        assert sum(step.num_oversize for step in found) == (3 + repeat if config.oversize == "drop" else 0)
        assert not any(step.is_partial for step in found[:-1])
        last = lengths[found[-1].samples]
        full = last.sum() >= (config.tokens_per_step or 0) and len(last) == 2 * (config.samples_per_step or len(last) / 2)
        assert found[-1].is_partial == (not full)


def test_dropped_samples_are_counted_once_and_make_no_step_smaller(index, dataset, encoder):
    tokens = index.tokens(range(COUNT))
    limit = int(np.median(tokens))
    settings = dict(max_tokens=limit, oversize="drop", num_microbatches=None, samples_per_step=4)
    ranks = [source(index, dataset, encoder, rank, 2, **settings) for rank in (0, 1)]
    found = [name for one in ranks for pack in names(one) for name in pack]
    assert sorted(found) == sorted(one["sample_id"] for one, length in zip(dataset, tokens, strict=True) if length <= limit)
    assert {one.num_dropped for one in ranks} == {int((tokens > limit).sum())}
    steps = list(index.planner(config(**settings), encoder.adapter, num_ranks=2).steps(epoch=0))
    assert {len(step.samples) for step in steps[:-1]} == {8}


def test_epochs_and_seeds_have_their_own_order(index, dataset, encoder):
    one = source(index, dataset, encoder)
    first, second = names(one), names(one)
    assert first != second
    assert names(source(index, dataset, encoder)) == first
    assert names(source(index, dataset, encoder, seed=1)) != first
    plain = index.planner(config(shuffle=False), encoder.adapter, num_ranks=2)
    assert [number for step in plain.steps(epoch=3) for number in step.samples] == list(range(COUNT))


@pytest.mark.parametrize("read", [0, 1, 4, 5, 10, None])
def test_a_resumed_source_goes_on_where_it_stood(index, dataset, encoder, read):
    one = source(index, dataset, encoder)
    iterator = iter(one)
    list(itertools.islice(iterator, read))
    state = json.loads(json.dumps(one.state_dict()))
    rest = names(iterator) if read is not None else None
    following = names(one)
    again = source(index, dataset, encoder)
    again.load_state_dict(state)
    if read is not None:
        assert names(again) == rest
    assert names(again) == following


def test_another_number_of_ranks_divides_what_is_left(index, dataset, encoder):
    ranks = [source(index, dataset, encoder, rank, 2) for rank in (0, 1)]
    read, states = [], []
    for one in ranks:
        read += names(itertools.islice(iter(one), 4))
        states.append(one.state_dict())
    rest = []
    for rank in range(3):
        one = source(index, dataset, encoder, rank, 3)
        with pytest.raises(ValueError, match="of 2 ranks, this job has 3"):
            one.load_state_dict(states[0])
        one.load_state_dicts(states)
        rest += names(one)
    found = list(itertools.chain(*read, *rest))
    assert sorted(found) == sorted(one["sample_id"] for one in dataset)


@pytest.mark.parametrize(
    ("settings", "message"),
    [(dict(seed=4), "seed was 0, is 4"), (dict(max_tokens=2048), "max_tokens was 1024, is 2048")],
)
def test_a_state_of_another_plan_is_refused(index, dataset, encoder, settings, message):
    with pytest.raises(ValueError, match=message):
        source(index, dataset, encoder, **settings).load_state_dict(source(index, dataset, encoder).state_dict())


def test_the_scheduler_takes_planned_packs_as_they_are(index, dataset, encoder):
    from evenpack.scheduler import PackingScheduler, ProcessGroups, SchedulerConfig
    from evenpack.scheduler.testing import run_ranks

    def train(rank, num_ranks):
        packs = source(index, dataset, encoder, rank, num_ranks, sync="microbatch")
        settings = SchedulerConfig(max_tokens=1024, scope="microbatch", num_microbatches=2, sync="microbatch", timeout=60.0)
        out = []
        with PackingScheduler(packs, config=settings, adapter=encoder.adapter, groups=ProcessGroups.from_world()) as scheduler:
            for step in scheduler:
                out += [[name for name in batch.sample_ids if name is not None] for batch in step]
        return out

    packed = run_ranks(train, 2)
    assert packed == [names(source(index, dataset, encoder, rank, 2, sync="microbatch")) for rank in (0, 1)]


@pytest.mark.parametrize("settings", [dict(samples_per_step=None), dict(samples_per_step=1, tokens_per_step=9), dict(seed=-1)])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueError):
        config(**settings)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 1023, 1025])
def test_a_permutation_has_every_number_once(count):
    one = Permutation(count, seed=count)
    whole = one(0, count)
    assert sorted(whole.tolist()) == list(range(count))
    assert one(count // 2, count).tolist() == whole[count // 2 :].tolist()
    if count >= 100:
        assert whole.tolist() != Permutation(count, seed=count + 1)(0, count).tolist() != list(range(count))
        # No trace of the order is left: neighbours are as far apart as chance puts them.
        assert abs(np.abs(np.diff(whole)).mean() / count - 1 / 3) < 0.06


def test_json_lines_and_tables(dataset, tmp_path):
    rows = [{"messages": one["messages"], "sample_id": one["sample_id"]} for one in dataset[:5]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    lines = open_dataset(tmp_path / "a.jsonl")
    assert isinstance(lines, JsonLines) and list(lines) == rows and lines[-1] == rows[-1] and lines[1:3] == rows[1:3]
    with pytest.raises(ValueError, match="no file"):
        open_dataset(tmp_path / "b.jsonl")


def test_docstrings():
    import doctest

    import evenpack.scheduler.offline.permutation as module

    assert doctest.testmod(module).failed == 0
