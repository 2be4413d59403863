"""After `warm_up` no plan compiles anything: the first step pays nothing, and what the settings do not need is not compiled."""

import subprocess
import sys

import pytest

CHECK = """
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from evenpack.scheduler.plan import MediaTowers, PlanConfig, SampleTable, plan_step, warm_up
from evenpack.scheduler.plan.kernels import fill, scan, swap

def signatures():
    functions = {name: value for module in (fill, scan, swap) for name, value in vars(module).items()}
    return {name: len(value.signatures) for name, value in functions.items() if isinstance(value, Dispatcher)}

modes = [(sync, movement) for sync in ("step", "microbatch") for movement in ("minimal", "free")]
if sys.argv[1] == "all":
    warm_up()
else:
    modes = [tuple(sys.argv[1].split("-"))]
    warm_up(PlanConfig(max_tokens=8, sync=modes[0][0], movement=modes[0][1]))
compiled = signatures()
rng = np.random.default_rng(0)
for phases in (1, 2):
    for shape in (0.4, 1.4):
        lengths = np.minimum(np.exp(rng.normal(2.5, shape, 90)).astype(int) + 1, 100)
        cost = lengths[:, None] * rng.integers(1, 9, (90, phases))
        table = SampleTable.from_lengths(lengths, cost=cost, home=rng.integers(0, 4, 90), media=rng.integers(0, 2, 90))
        for sync, movement in modes:
            for stages, peers, nodes in ((1, None, None), (3, None, [0, 1, 0, 1]), (1, [[1], [2], [3], [0]], None)):
                config = PlanConfig(max_tokens=100, sync=sync, movement=movement, pipeline_stages=stages)
                towers = MediaTowers(dummy_tokens={"image": 4}, trained=("image",))
                plan_step(table, num_ranks=4, config=config, towers=towers, peers=peers, node_of_rank=nodes)
after = signatures()
print({name: (compiled[name], after[name]) for name in compiled if compiled[name] != after[name]})
print([name for name, count in after.items() if count > 2])
print([name for name in ("polish", "return_home") if after[name]])
"""


@pytest.mark.parametrize(
    ("modes", "only_there"),
    [
        ("all", ["polish", "return_home"]),
        ("step-minimal", []),
        pytest.param("step-free", ["polish"], marks=pytest.mark.full),
        pytest.param("microbatch-minimal", ["return_home"], marks=pytest.mark.full),
        ("microbatch-free", []),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(modes, only_there):
    done = subprocess.run([sys.executable, "-c", CHECK, modes], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["{}", "[]", str(only_there)]
