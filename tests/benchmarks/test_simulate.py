"""Pure parts of the simulation: costs of smaller groups, and steps under errors of the cost model."""

import numpy as np
import pytest

from benchmarks.simulate.groups import config_of, draw, with_errors
from benchmarks.simulate.measure import foretell, shapes
from benchmarks.simulate.tables import step_table
from evenpack.scheduler import CostModel
from evenpack.scheduler.cost.model import Observation
from evenpack.scheduler.plan import plan_step

#: Seconds of a micro-batch: 1 ms, 2 us a token, 1 ns a token squared, 0.5 us a patch, 0.1 ns a patch squared.
TRUE = (1e-3, 2e-6, 1e-9, 0.5e-6, 1e-10)


def observed(pack):
    tokens = [words + sum(h * w // 4 for h, w in grids) for words, grids in pack]
    patches = [h * w for _, grids in pack for h, w in grids]
    features = (1, sum(tokens), sum(n * n for n in tokens), sum(patches), sum(n * n for n in patches))
    seconds = sum(a * b for a, b in zip(TRUE, features, strict=True))
    return Observation(tokens=tokens, grids=[(1, h, w) for _, grids in pack for h, w in grids], seconds=seconds)


@pytest.fixture(scope="module")
def fit():
    return CostModel.fit([observed(pack) for pack in shapes(40, seed=0)])


def test_a_fit_foretells_packs_that_it_did_not_see(fit):
    others = [observed(pack) for pack in shapes(20, seed=1)]
    assert [foretell(fit, each) for each in others] == pytest.approx([each.seconds for each in others], rel=1e-3)


def test_a_smaller_group_has_the_first_samples_and_the_measured_costs(fit):
    drawn = draw("image-text", 4, 8, fit)
    table = drawn.table(2, measured=True, phases=True)
    assert len(table) == 16 and table.home.max() == 1
    grids = drawn.workload.grids
    assert [tuple(row) for row in table.cost.tolist()] == [
        fit.model.sample_cost(int(table.tokens[i]), grids[i]) for i in range(16)
    ]
    assert drawn.table(2, measured=True, phases=False).cost.tolist() == table.cost.sum(axis=1).tolist()
    assert drawn.table(2, measured=False, phases=False).cost.tolist() == drawn.workload.table.cost[:16].sum(axis=1).tolist()


@pytest.mark.parametrize(("sync", "phases"), [("step", False), ("microbatch", False), ("microbatch", True)])
def test_without_errors_a_step_takes_the_objective(fit, sync, phases):
    drawn = draw("image-text", 4, 8, fit)
    config = config_of(drawn, sync, microbatch_cost=1000)
    plan = plan_step(drawn.table(4, measured=True, phases=phases), num_ranks=4, config=config, towers=drawn.workload.towers)
    assert with_errors(plan, config, [1.0], seed=0) == plan.value
    assert with_errors(plan, config, [0.8, 1.2], seed=0) != plan.value
    work = plan.value - 1000 * plan.num_microbatches
    assert with_errors(plan, config, [2.0], seed=0) == pytest.approx(2 * work + 1000 * plan.num_microbatches)
    assert np.isfinite(plan.gap)


def test_tables_have_a_row_per_case_and_a_column_per_size():
    case = {"model": "7B", "workload": "image-text", "sync": "step", "planner": "evenpack", "attainable": True}
    records = [case | {"ranks": 64, "over_bound": 1.01}, case | {"ranks": 1024, "over_bound": 1.5, "attainable": False}]
    assert step_table(records).splitlines()[0] == "| costs | workload | sync | planner | 64 ranks | 1,024 ranks |"
    assert step_table(records).splitlines()[2:] == ["| 7B | image-text | `step` | evenpack | 1.010 | 1.500 * |"]
