"""Groups through the scheduler: members stay together, what they share moves and is computed once, results come home."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from evenpack.core import Field, FieldShapeError, OversizeSampleError, PeerFailedError, UnsafeModelError
from evenpack.models import adapter_for
from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.testing import run_ranks

from .helpers import VISION, flat, image_sample, names_of, open_scheduler


def answers(group, prompt, lengths, **more):
    """Return members of a group: a prompt that trains nothing, and answers that begin differently."""
    ids = [(7 * at + prompt) % 97 for at in range(prompt)]
    return [
        {
            "input_ids": [*ids, *[90 + number] * length],
            "labels": [-100] * prompt + [90 + number] * length,
            "group_id": group,
            "sample_id": f"{group}-{number}",
            **more,
        }
        for number, length in enumerate(lengths)
    ]


def source(rank, count=6):
    """Return groups of different sizes, with samples of no group between them."""
    groups = [
        answers(f"{rank}.{at}", 5 + 3 * at, [2 + (at * number) % 7 for number in range(1 + at % 4)]) for at in range(count)
    ]
    loose = [{"input_ids": [1, 2, 3 + at], "sample_id": f"{rank}-loose-{at}"} for at in range(2)]
    return [*itertools.chain(*groups[:3]), loose[0], *itertools.chain(*groups[3:]), loose[1]]


def everyone(num_ranks):
    return sorted(sample["sample_id"] for rank in range(num_ranks) for sample in source(rank))


@pytest.mark.parametrize("groups", ["split", "together", "prompt", "prefix"])
@pytest.mark.parametrize(("sync", "lookahead"), [("step", 1), ("microbatch", 1), ("microbatch", 3)])
def test_every_member_once(groups, sync, lookahead):
    def fn(rank, num_ranks):
        steps = []
        with open_scheduler(source(rank), groups=groups, sync=sync, samples_per_step=4, lookahead=lookahead) as scheduler:
            for step in scheduler:
                for batch in step:
                    of_group = {}
                    for name, group, index in zip(batch.sample_ids, batch.group_id, batch.group_index.tolist(), strict=False):
                        if groups != "split":
                            assert of_group.setdefault(group if group else name, index) == index
                    assert batch.num_samples == len([name for name in batch.sample_ids if name])
                steps.append((names_of(step), step.num_samples, step.num_groups, step.stats.num_samples, step.home_ids))
        return steps

    by_rank = run_ranks(fn, 2, backend="gloo")
    assert sorted(name for steps in by_rank for step in steps for name in flat(step[0])) == everyone(2)
    for first, second in zip(*by_rank, strict=True):
        assert first[1:4] == second[1:4]
        assert first[1] == first[3] == sum(len(pack) for names in (first[0], second[0]) for pack in names)
    if groups != "split":
        assert sum(step[2] for step in by_rank[0]) == 2 * (6 + 2)
    if groups == "together":
        packs = [pack for steps in by_rank for step in steps for pack in step[0]]
        for rank, at in itertools.product(range(2), range(6)):
            assert len({number for number, pack in enumerate(packs) for name in pack if name.startswith(f"{rank}.{at}-")}) == 1


def test_what_is_shared_is_packed_and_moved_once():
    def fn(rank, num_ranks, groups):
        images = image_sample([(1, 8, 8)], "x", text=5, seed=rank)
        members = []
        for number in range(4 if rank == 0 else 0):
            ids = torch.cat([images["input_ids"], torch.tensor([90 + number, 3])])
            labels = torch.where(torch.arange(len(ids)) < len(ids) - 2, -100, ids)
            members.append({**images, "input_ids": ids, "labels": labels, "sample_id": number, "group_id": "g"})
        with open_scheduler(members, adapter=VISION, groups=groups, movement="free", max_tokens=256) as scheduler:
            step = next(scheduler)
            batches = list(step)
            patches = sum(0 if b.media.get("pixel_values") is None else len(b.media["pixel_values"]) for b in batches)
            names = [name for batch in batches for name in batch.sample_ids if name is not None]
            return patches if names else 0, step.seqlen_sum, int(step.table.nbytes.sum()), step.seqlen_squared_sum

    split = run_ranks(functools.partial(fn, groups="split"), 2, backend="gloo")
    prompt = run_ranks(functools.partial(fn, groups="prompt"), 2, backend="gloo")
    assert sum(one[0] for one in split) == 4 * 64 and sum(one[0] for one in prompt) == 64
    assert prompt[0][1] == split[0][1] - 3 * (len(image_sample([(1, 8, 8)], "x", text=5)["input_ids"]) - 1)
    assert prompt[0][2] < split[0][2] / 3.5 and prompt[0][3] == split[0][3]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("iterator", [False, True])
def test_resume_at_every_step(prefetch, iterator):
    """Also where a step ends inside a group of the source; the limit for heavy groups is that of the last plan."""

    def fn(rank, num_ranks):
        def opened():
            samples = source(rank)
            return open_scheduler(
                iter(samples) if iterator else samples, groups="prompt", samples_per_step=2, prefetch=prefetch
            )

        with opened() as scheduler:
            whole = [names_of(step) for step in scheduler]
        for stop in range(1, len(whole)):
            samples = iter(source(rank))
            more = {"groups": "prompt", "samples_per_step": 2, "prefetch": prefetch}
            with open_scheduler(samples if iterator else source(rank), **more) as scheduler:
                head = [names_of(next(scheduler)) for _ in range(stop)]
                state = scheduler.state_dict()
            with open_scheduler(samples if iterator else source(rank), **more) as scheduler:
                scheduler.load_state_dict(state)
                assert [*head, *(names_of(step) for step in scheduler)] == whole, stop
        return True

    assert run_ranks(fn, 2, backend="gloo") == [True, True]


def test_another_number_of_ranks_trains_every_member_once():
    def save(rank, num_ranks):
        with open_scheduler(iter(source(rank)), groups="together", samples_per_step=2) as scheduler:
            return names_of(next(scheduler)), scheduler.state_dict()

    first = run_ranks(save, 2, backend="gloo")
    states = [state for _, state in first]

    def resume(rank, num_ranks):
        with open_scheduler([], groups="together", samples_per_step=2) as scheduler:
            scheduler.load_state_dicts(states)
            return [names_of(step) for step in scheduler]

    later = [name for steps in run_ranks(resume, 4, backend="gloo") for name in flat(steps)]
    seen = [name for names, _ in first for name in flat(names)] + later
    assert len(seen) == len(set(seen)) and set(seen) <= set(everyone(2)) and later


def test_results_come_home():
    def fn(rank, num_ranks):
        with open_scheduler(source(rank), groups="prompt", samples_per_step=8, movement="free") as scheduler:
            step = next(scheduler)
            values = [[ids.sum() for ids in batch.unpack(batch.input_ids)] for batch in step]
            assert step.plan.moved_bytes
            return dict(zip(step.home_ids, step.return_home(values), strict=True))

    for rank, found in enumerate(run_ranks(fn, 2, backend="gloo")):
        assert found == {sample["sample_id"]: sum(sample["input_ids"]) for sample in source(rank)}


class Bigram(torch.nn.Module):
    """Logits by the last two tokens that a position sees, through positions and boundaries alone: no attention to set up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(128, 128, dtype=torch.float64)

    def forward(self, input_ids):
        return self.table(input_ids)


@pytest.mark.parametrize(
    ("groups", "average"), [("prompt", "token"), ("prompt", "sample"), ("prefix", "token"), ("together", "sample")]
)
def test_loss_is_that_of_members_alone(groups, average):
    """Weighted means over tokens or samples; with "prefix" the question is learned too, as often as it is asked."""

    def members(rank):
        found = source(rank)
        if groups == "prefix":
            for sample in found:
                sample["labels"] = sample["input_ids"]
        return found

    def fn(rank, num_ranks):
        total, model = 0.0, Bigram()
        with open_scheduler(members(rank), groups=groups, loss_average=average, samples_per_step=8) as scheduler:
            step = next(scheduler)
            for batch in step:
                total += float(step.loss(model(batch.input_ids), batch).detach())
            return total / num_ranks

    found, alone, weight, model = sum(run_ranks(fn, 2, backend="gloo")), 0.0, 0.0, Bigram()
    for sample in [*members(0), *members(1)]:
        ids = torch.tensor(sample["input_ids"])
        labels = torch.tensor(sample.get("labels", sample["input_ids"]))[1:]
        each = F.cross_entropy(model(ids[:-1]), labels, ignore_index=-100, reduction="none")
        count = int((labels != -100).sum())
        alone += float(each.sum() / (count if average == "sample" else 1))
        weight += 1 if average == "sample" else count
    assert found == pytest.approx(alone / weight, rel=1e-6)  # scaled weights are float32


def test_heavy_groups_are_taken_apart():
    """Parts have copies of the prefix, fit a pack, and cost at most half of the mean load; "together" is an error."""

    def fn(rank, num_ranks, groups):
        big = [*answers(f"{rank}.big", 20, [15] * 8), *answers(f"{rank}.pair", 10, [25, 26])]
        steps = [answers(f"{rank}.{at}", 4, [3, 3]) for at in range(3)]
        with open_scheduler([*itertools.chain(*steps), *big], groups=groups, samples_per_step=4, max_tokens=72) as scheduler:
            found = []
            for step in scheduler:
                found.append((names_of(step), [batch.bounds.total for batch in step], step.num_groups))
            return found

    for packs in run_ranks(functools.partial(fn, groups="prompt"), 2, backend="gloo"):
        assert max(total for _, totals, _ in packs for total in totals) <= 72
        assert sum(groups for _, _, groups in packs) == 10
        parts = [pack for names, _, _ in packs for pack in names if any("big" in name for name in pack)]
        assert len(parts) >= 2
        pairs = [{name for name in pack if "pair" in name} for names, _, _ in packs for pack in names]
        assert all(len(pair) % 2 == 0 for pair in pairs)

    def refused(rank, num_ranks):
        with pytest.raises(
            OversizeSampleError, match=r"group '0.big': 8 samples of 280 tokens \(280 padded\) exceed the capacity of 72"
        ):
            fn(rank, num_ranks, "together")

    run_ranks(refused, 2, backend="gloo")


@pytest.mark.parametrize(
    ("samples", "settings", "error", "text"),
    [
        (
            [*answers("a", 3, [1]), *answers("b", 3, [1]), *answers("a", 3, [1])],
            {},
            FieldShapeError,
            "'a' comes back at sample 2",
        ),
        (
            [answers("a", 3, [1])[0], {**answers("a", 3, [1, 2])[1], "advantages": [1.0] * 5}],
            {},
            FieldShapeError,
            "members 0 and 1",
        ),
    ],
)
def test_wrong_groups(samples, settings, error, text):
    def fn(rank, num_ranks):
        more = [Field(name="advantages", kind="token", dtype="float32")]
        scheduler = open_scheduler(samples if rank == 0 else [], groups="prompt", fields=more, **settings)
        with scheduler, pytest.raises((error, PeerFailedError), match=text):
            list(scheduler)

    run_ranks(fn, 2, backend="gloo")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"oversize": "truncate"}, "groups='prompt' excludes oversize='truncate'"),
        ({"scope": "microbatch", "samples_per_step": None, "num_microbatches": 2}, "excludes scope='microbatch'"),
        ({"groups": "prefix", "loss_average": "sample"}, "excludes loss_average='sample'"),
        ({"static_shapes": True, "max_segments": 8}, "excludes static_shapes"),
        ({"groups": "tree"}, "groups must be one of"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        SchedulerConfig(**{"max_tokens": 64, "samples_per_step": 2, "groups": "prompt", **settings})


def test_families_with_blocks_share_nothing():
    import transformers

    adapter = adapter_for(transformers.Gemma3Config())

    def fn(rank, num_ranks):
        with pytest.raises(UnsafeModelError, match="groups must be 'split' or 'together', got 'prompt'"):
            open_scheduler([], adapter=adapter, groups="prompt")

    run_ranks(fn, 1)
