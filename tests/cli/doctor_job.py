"""A job for torchrun: `evenpack doctor`, with something wrong on the last rank."""

import os
import sys

from evenpack.cli.doctor import group, local
from evenpack.cli.main import run
from evenpack.scheduler.stages import exchange


def plant(what: str) -> None:
    """Break something on the last rank."""
    if os.environ["RANK"] != str(int(os.environ["WORLD_SIZE"]) - 1):
        return
    if what == "version":
        local.must_agree = lambda: {"evenpack": "0.0.1", "planner": "other", "wire_version": 1}
    elif what == "library":
        versions = local.versions
        local.versions = lambda: {**versions(), "numba": "0.1"}
    elif what == "clock":
        now = group.clock
        group.clock = lambda: now() + 30
    elif what == "wire":
        read = exchange.read_blocks

        def corrupting(data, *rest):
            data[100] ^= 1
            return read(data, *rest)

        exchange.read_blocks = corrupting
    elif what == "dead":
        sys.exit(0)


if __name__ == "__main__":
    plant(sys.argv[1])
    sys.exit(run(["doctor", "--megabytes", "1", *sys.argv[2:]]))
