"""Run the checks, on one process or on the ranks of a job, and bring everyone's findings together."""

import argparse
import os
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from ...scheduler import ProcessGroups, SchedulerConfig
from ...scheduler.comm.channel import Channel, open_channel
from ...scheduler.comm.transports import gather_bytes
from . import group, local
from .finding import Examined, Finding, merge
from .model import check_model


def examine(arguments: argparse.Namespace) -> Examined:
    """Run every check.

    Args:
        arguments: of the command line.

    Returns:
        The findings of all ranks, on every rank; where the group breaks, those of this rank.
    """
    findings = _look_alone(arguments)
    began = False
    try:
        began = _join_job(arguments.timeout)
        groups = ProcessGroups.from_world()
        config = SchedulerConfig(max_tokens=8, samples_per_step=1, timeout=arguments.timeout, transport=arguments.transport)
        channel = open_channel(groups, config)
    except (RuntimeError, ValueError, OSError) as error:
        findings.append(_group_failed(error))
        return _alone(findings)
    try:
        findings += _look_together(channel, arguments)
        everyone = gather_bytes(channel.steps, msgspec.json.encode(findings))
        by_rank = {rank: msgspec.json.decode(data, type=list[Finding]) for rank, data in enumerate(everyone)}
        return Examined(num_ranks=groups.num_ranks, prints=groups.rank == 0, findings=merge(by_rank))
    except Exception as error:
        findings.append(_group_failed(error))
        return _alone(findings)
    finally:
        channel.abort()
        channel.close()
        if began:
            dist.destroy_process_group()


def _join_job(timeout: float) -> bool:
    """Join the job that torchrun started, if it did, as a training script does; return whether this did.

    Raises:
        RuntimeError: the others did not come.
    """
    import datetime

    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        return False
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    return True


def _look_alone(arguments: argparse.Namespace) -> list[Finding]:
    """Return what this process finds by itself."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // max(1, local_ranks)
    checks: tuple[Callable[[], Finding | None], ...] = (
        local.check_versions,
        local.check_backends,
        lambda: local.check_alignment(
            cp=arguments.cp_size,
            tp=arguments.tp_size,
            sequence_parallel=arguments.sequence_parallel,
            fp8=arguments.fp8,
            max_tokens=arguments.max_tokens,
        ),
        lambda: local.check_cache(local.cache_folder()),
        # One rank speaks for its machine.
        lambda: (
            local.check_memory(*local.free_memory(), local_ranks, held=_held(arguments))
            if os.environ.get("LOCAL_RANK", "0") == "0"
            else None
        ),
        local.check_pinned,
        lambda: local.check_interface(nodes),
        lambda: None if arguments.model is None else check_model(arguments.model),
    )
    return [finding for check in checks if (finding := check()) is not None]


def _held(arguments: argparse.Namespace) -> int:
    """Return the bytes of samples that a rank holds: of the steps in view, and of the one that is prepared ahead."""
    return int((arguments.lookahead + 1) * (arguments.step_megabytes or 0) * 1e6)


def _look_together(channel: Channel, arguments: argparse.Namespace) -> list[Finding]:
    """Return what the ranks find together; collective."""
    steps = channel.steps
    kinds = [type(transport).__name__.removesuffix("Transport").lower() for transport in (steps, channel.blocks)]
    kind = " and ".join(dict.fromkeys(kinds))
    nodes = len(set(channel.node_of_rank))
    found = [
        Finding(
            name="group",
            text=f"{steps.num_ranks} rank{'s' if steps.num_ranks > 1 else ''} on {nodes} machine{'s' if nodes > 1 else ''}, "
            f"transport {kind}",
            figures={"num_ranks": steps.num_ranks, "nodes": nodes, "transport": kind},
        ),
        group.check_agreement(steps),
    ]
    if not group.is_fine_everywhere(steps, found):
        return found  # ranks that speak another language cannot go on
    found += [group.check_wire(channel), group.check_clocks(steps)]
    if group.is_fine_everywhere(steps, found):
        found += group.measure(channel, arguments.megabytes)
    return found


def _group_failed(error: Exception) -> Finding:
    fix = "are all ranks started, can they reach one another (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewalls)?"
    return Finding(name="group", level="wrong", text=f"{type(error).__name__}: {error}".splitlines()[0], fix=fix)


def _alone(findings: list[Finding]) -> Examined:
    rank = int(os.environ.get("RANK", "0"))
    # The group is no help: every rank says what it saw.
    return Examined(num_ranks=1, prints=True, findings=merge({rank: findings}))
