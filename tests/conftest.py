"""Set-up of the whole test run."""

import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch asks the resolver for names of loopback addresses; where an answer is lost, a rank waits for a second, not for five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_configure(config):
    """Compile the planner's kernels before time limits of ranks start; forked ranks find them in memory."""
    from evenpack.scheduler.plan import warm_up

    warm_up()
