"""Set-up of the whole test run."""

import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config):
    """Compile the planner's kernels once, before worker processes and time limits of simulated ranks start."""
    if not hasattr(config, "workerinput"):
        from evenpack.scheduler.plan import warm_up

        warm_up()
