"""The exact optimum of small instances by CP-SAT: the reference for bounds and plans."""

import numpy as np
from ortools.sat.python import cp_model

from evenpack.scheduler.plan import PlanConfig, SampleTable


def optimum(table: SampleTable, num_ranks: int, num_microbatches: int, config: PlanConfig, speeds=None) -> int | None:
    """Least objective of any plan with these micro-batches, without media; None where there is none."""
    solution = _solve(table, num_ranks, num_microbatches, config, None, speeds)
    return None if solution is None else solution + config.microbatch_cost * num_microbatches


def least_moved_bytes(
    table: SampleTable, num_ranks: int, num_microbatches: int, config: PlanConfig, value: int, speeds=None
) -> int:
    """Least bytes that leave home in any plan whose objective is at most `value`."""
    found = _solve(table, num_ranks, num_microbatches, config, value - config.microbatch_cost * num_microbatches, speeds)
    assert found is not None
    return found


def _solve(table, num_ranks, count, config, at_most, speeds):
    model, speeds = cp_model.CpModel(), speeds or [1024] * num_ranks
    samples, ranks, indices = range(len(table)), range(num_ranks), range(count)
    cost = table.cost.reshape(len(table), -1)
    here = {(i, r, m): model.new_bool_var("") for i in samples for r in ranks for m in indices}
    for i in samples:
        model.add_exactly_one(here[i, r, m] for r in ranks for m in indices)
    for r in ranks:
        for m in indices:
            model.add(sum(int(table.padded[i]) * here[i, r, m] for i in samples) <= config.max_tokens)
            if config.max_segments is not None:
                model.add(sum(here[i, r, m] for i in samples) <= config.max_segments)

    def load(r, m, k):
        return sum(int(cost[i, k]) * here[i, r, m] for i in samples)

    most = int(cost.sum()) * config.pipeline_stages * 1024 // min(speeds) + 1
    phases = range(cost.shape[1])
    if config.sync == "microbatch":
        largest = [model.new_int_var(0, most, "") for _ in indices for _ in phases]
        for number, (m, k) in enumerate((m, k) for m in indices for k in phases):
            for r in ranks:
                model.add(speeds[r] * largest[number] >= 1024 * load(r, m, k))
        objective = sum(largest)
    else:
        objective = model.new_int_var(0, most, "")
        for r in ranks:
            total = sum(load(r, m, k) for m in indices for k in phases)
            if config.pipeline_stages == 1:
                model.add(speeds[r] * objective >= 1024 * total)
                continue
            for m in indices:
                peak = sum(load(r, m, k) for k in phases)
                model.add(speeds[r] * objective >= 1024 * (total + (config.pipeline_stages - 1) * peak))
    if at_most is None:
        model.minimize(objective)
    else:
        model.add(objective <= at_most)
        model.minimize(
            sum(int(table.nbytes[i]) * here[i, r, m] for i in samples for r in ranks for m in indices if r != table.home[i])
        )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 60
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL, "raise the time or take a smaller instance"
    return round(solver.objective_value)


def small_table(seed: int, *, phases: int = 1, samples: int = 9, ranks: int = 2, capacity: int = 40) -> SampleTable:
    """A random instance small enough for the exact solver."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(2.3, 0.8, samples)).astype(np.int64), 1, capacity)
    cost = lengths[:, None] * 4 + rng.integers(0, 30, (samples, phases)) * rng.integers(0, 2, (samples, phases))
    return SampleTable.from_lengths(
        lengths, cost=cost, home=rng.integers(0, ranks, samples), nbytes=rng.integers(1, 200, samples)
    )
