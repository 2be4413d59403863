"""A solver, a transport, a model family, a source and a framework, each added from outside the package."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extending import family
from extending.framework import PackedModule
from extending.solver import heaviest_first
from extending.source import Striped
from extending.transport import PlainTransport

from evenpack.collate import pack_samples
from evenpack.core import FieldMismatchError
from evenpack.models import adapter_for
from evenpack.models.registry import FAMILIES
from evenpack.scheduler import PackingScheduler, PlanConfig, ProcessGroups, SampleTable, SchedulerConfig, plan_step
from evenpack.scheduler.testing import run_ranks

LENGTHS = (90, 7, 40, 33, 12, 60, 5, 28)
CONFIG = SchedulerConfig(max_tokens=128, samples_per_step=4, timeout=30.0)
DOCUMENTS = [list(range(1, length + 1)) for length in LENGTHS]


def scheduled(rank, num_ranks, source=None, **more):
    """Open a scheduler over the world."""
    if source is None:
        source = [{"input_ids": ids, "sample_id": at} for at, ids in enumerate(DOCUMENTS) if at % num_ranks == rank]
    return PackingScheduler(source, config=CONFIG, adapter="text", groups=ProcessGroups.from_world(), **more)


def names(step):
    return [name for batch in step for name in batch.sample_ids if name is not None]


def test_solver():
    """Every sample once, on two ranks; the certificate says how far from the best it is."""

    def fn(rank, num_ranks):
        with scheduled(rank, num_ranks, planner=heaviest_first) as scheduler:
            return [(names(step), step.plan.gap) for step in scheduler]

    by_rank = run_ranks(fn, 2, backend="gloo")
    assert sorted(name for steps in by_rank for found, _ in steps for name in found) == list(range(8))
    table = SampleTable.from_lengths(np.random.default_rng(0).integers(1, 500, 400), home=np.arange(400) % 8)
    settings = {"num_ranks": 8, "config": PlanConfig(max_tokens=4096)}
    assert 0.98 < heaviest_first(table, **settings).value / plan_step(table, **settings).value < 1.05  # it stops at 1 %


def test_transport():
    def fn(rank, num_ranks):
        opened = []

        def transport(groups, timeout):
            opened.append(PlainTransport(groups, timeout))
            return opened[0]

        with scheduled(rank, num_ranks, transport=transport) as scheduler:
            own = [names(step) for step in scheduler]
            moved = scheduler.stats.moved_bytes
        with scheduled(rank, num_ranks) as scheduler:
            assert own == [names(step) for step in scheduler]
        return opened[0].sent_bytes, moved

    found = run_ranks(fn, 2, backend="gloo")
    assert sum(sent for sent, _ in found) == found[0][1] > 0


@pytest.mark.parametrize(
    ("transport_of", "error", "text"),
    [
        (lambda rank: PlainTransport if rank else None, FieldMismatchError, r"'' on rank 0 and 'PlainTransport' on rank 1"),
        (lambda rank: SimpleNamespace, TypeError, "a transport needs gather, alloc_send_buffers, exchange"),
    ],
)
def test_what_is_no_transport(transport_of, error, text):
    def fn(rank, num_ranks):
        made = transport_of(rank)
        if made is SimpleNamespace:
            made = lambda groups, timeout: SimpleNamespace(rank=rank, num_ranks=num_ranks)  # noqa: E731
        with pytest.raises(error, match=text):
            scheduled(rank, num_ranks, transport=made)

    run_ranks(fn, 2, backend="gloo")


def test_family():
    family.register()
    try:
        adapter = adapter_for(SimpleNamespace(model_type="my_llava", image_token_id=9))
        raw = {"input_ids": [1, 9, 9, 9, 9, 2], "pixel_values": torch.ones(1, 3, 8, 8)}
        batch = pack_samples([raw, {"input_ids": [5, 6]}], adapter=adapter)
        assert batch.media_token_validity_mask[0].tolist() == [False, *[True] * 4, False, False, False]
        assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    finally:
        FAMILIES.pop("my_llava")


def test_source():
    """Two epochs, left and resumed after the first step of the first."""

    def fn(rank, num_ranks):
        def source():
            return Striped(DOCUMENTS * 4, rank=rank, num_ranks=num_ranks)

        with scheduled(rank, num_ranks, source()) as scheduler:
            whole = [names(step) for _ in range(2) for step in scheduler]
        with scheduled(rank, num_ranks, source()) as scheduler:
            first, state = names(next(scheduler)), scheduler.state_dict()
        with scheduled(rank, num_ranks, source()) as scheduler:
            scheduler.load_state_dict(state)
            assert [first, *(names(step) for _ in range(2) for step in scheduler)] == whole
        return whole

    by_rank = run_ranks(fn, 2, backend="gloo")
    assert sorted(name for steps in by_rank for step in steps[:4] for name in step) == list(range(32))


class Trainer:
    """The framework: it knows optimizers and checkpoints, and nothing of packs."""

    def fit(self, module, optimizer, states):
        losses = []
        for batch in module.train_dataloader():
            optimizer.zero_grad()
            losses.append(float(module.training_step(batch)))
            optimizer.step()
            states.append(module.state_dict())
        return losses


class Bigram(torch.nn.Module):
    """Logits by the token alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(128, 128)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table(input_ids))


def test_framework():
    """The loss that a trainer sees is the mean over both ranks' targets; it resumes after a step."""

    def fn(rank, num_ranks):
        model, states = torch.nn.parallel.DistributedDataParallel(Bigram()), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with scheduled(rank, num_ranks, [{"input_ids": ids} for ids in DOCUMENTS]) as scheduler:
            losses = Trainer().fit(PackedModule(model, scheduler), optimizer, states)
        with scheduled(rank, num_ranks, [{"input_ids": ids} for ids in DOCUMENTS]) as scheduler:
            module = PackedModule(model, scheduler)
            module.load_state_dict(states[0])
            assert Trainer().fit(module, optimizer, []) == losses[1:]
        return losses

    steps = np.mean(run_ranks(fn, 2, backend="gloo"), axis=0)
    for loss, documents in zip(steps, (DOCUMENTS[:4], DOCUMENTS[4:]), strict=True):
        rows = [torch.tensor(ids) for ids in documents]
        logits = Bigram()(torch.cat([row[:-1] for row in rows])).logits
        assert loss == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, torch.cat([row[1:] for row in rows]))), rel=1e-5
        )
