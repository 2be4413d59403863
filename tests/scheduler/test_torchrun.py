"""The scheduler in a real job: torchrun, one process per rank, gloo over loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .helpers import flat


def test_torchrun_job_computes_every_sample_once(tmp_path):
    job = Path(__file__).with_name("torchrun_job.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(job), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(steps) for steps in outcomes] == [3, 3]
    assert [len(packs) for packs in outcomes[0]] == [len(packs) for packs in outcomes[1]]
    assert sorted(flat(outcomes)) == sorted(f"{rank}-{index}" for rank in range(2) for index in range(20))
