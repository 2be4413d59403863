"""The example: a Hugging Face tower in front of GPTModel, trained through Megatron-Core's schedules."""

import warnings

import pytest

from .helpers import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers.models.qwen2_vl")
    from run import on_rank


def losses(steps, per_step, *, packed=True, num_ranks=1, **sizes):
    return run_ranks(lambda rank, size: on_rank(sizes, steps, per_step, packed=packed), num_ranks, backend="gloo", timeout=120)


@pytest.fixture(scope="module")
def one_rank():
    return losses(10, 8)[0]


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, {"pp": 2}), (2, {"cp": 2}), (4, {"pp": 2, "cp": 2})])
def test_every_split_trains_like_one_rank(one_rank, num_ranks, sizes):
    for found in losses(10, 8, num_ranks=num_ranks, **sizes):
        assert found == pytest.approx(one_rank, abs=1e-5)


def test_a_run_on_packs_takes_the_course_of_one_on_single_samples():
    """Thirty steps here; `python examples/megatron/run.py --compare --steps 200 --batch 4` runs longer."""
    packed, alone = losses(30, 4)[0], losses(30, 4, packed=False)[0]
    assert packed == pytest.approx(alone, abs=1e-4)
    assert sum(packed[-5:]) < 0.95 * sum(packed[:5])
