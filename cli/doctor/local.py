"""What one process can tell by itself."""

import importlib.metadata
import os
import platform
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from .finding import Finding

#: Libraries by the name that they are installed under.
_LIBRARIES = (
    "torch", "numpy", "numba", "msgspec", "xxhash", "transformers", "accelerate", "megatron-core", "transformer-engine",
)  # fmt: skip
#: Host memory of a rank below which pinned buffers of large steps may not find room, in bytes.
_LEAST_MEMORY = 2 << 30
#: Shared memory below which workers of a DataLoader die with a bus error, in bytes.
_LEAST_SHARED = 1 << 30
#: Compiling the planner takes longer than this; loading it from the cache does not.
_COLD_SECONDS = 8.0


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of what is used; None where a library is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def must_agree() -> dict[str, Any]:
    """Return what has to be the same on every rank: other code would plan, or read blocks, in another way."""
    from ..._version import __version__  # pyright: ignore[reportMissingImports]
    from ...scheduler.plan import CODE_VERSION
    from ...scheduler.stages.gather import WIRE_VERSION

    return {"evenpack": __version__, "planner": CODE_VERSION, "wire_version": WIRE_VERSION}


def check_versions() -> Finding:
    """List the versions."""
    ours, found = must_agree(), versions()
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = ", ".join(name for name, version in found.items() if version is None)
    text = f"evenpack {ours['evenpack']}, {text}" + (f"; not installed: {missing}" if missing else "")
    return Finding(name="versions", text=text, figures={**ours, **found})


def check_backends() -> Finding:
    """See what can carry a group, and whether every local rank has a device."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding(
            name="backends", level="wrong", text="this torch has no torch.distributed", fix="install another build of torch"
        )
    names = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"{', '.join(names)}; {devices} CUDA device{'s' if devices != 1 else ''}"
    figures = {"backends": names, "cuda_devices": devices}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "gloo" not in names:
        fix = "blocks travel over gloo: install a build of torch that has it"
        return Finding(name="backends", level="wrong", text=text, fix=fix, figures=figures)
    if 0 < devices < local:
        text += f", and {local} ranks on this machine"
        return Finding(name="backends", level="wrong", text=text, fix=f"--nproc-per-node {devices}", figures=figures)
    return Finding(name="backends", text=text, figures=figures)


def cache_folder() -> Path | None:
    """Return where the compiled planner is kept; None where no folder can be written."""
    from ...scheduler.plan.kernels import scan

    path = getattr(getattr(scan.group, "_cache", None), "cache_path", None)
    return None if path is None else Path(path)


def check_cache(folder: Path | None) -> Finding:
    """See that the compiled planner can be kept, and where; and load or compile it."""
    fix = "set NUMBA_CACHE_DIR to a folder on a local disk that every rank of the machine can write to"
    asked = os.environ.get("NUMBA_CACHE_DIR")
    ignored = ""  # numba takes another folder without a word
    if asked and (folder is None or Path(asked).resolve() not in folder.resolve().parents):
        ignored = f"NUMBA_CACHE_DIR={asked} cannot be written, and numba ignores it: "
    if folder is None or not _can_write(folder):
        where = "no folder for the compiled planner can" if folder is None else f"{folder}, for the compiled planner, cannot"
        text = f"{ignored}{where} be written: every start compiles it again, some 15 seconds"
        return Finding(name="numba cache", level="wrong", text=text, fix=fix)
    from ...scheduler.plan import warm_up

    start = time.monotonic()
    warm_up()
    seconds = time.monotonic() - start
    state = "was compiled just now, and is there from now on" if seconds > _COLD_SECONDS else "is there"
    figures = {"seconds": round(seconds, 2), "folder": str(folder)}
    if ignored:
        text = f"{ignored}the compiled planner goes to {folder} instead"
        return Finding(name="numba cache", level="note", text=text, fix=fix, figures=figures)
    return Finding(name="numba cache", text=f"the compiled planner {state}: {folder}", figures=figures)


def _can_write(folder: Path) -> bool:
    """Return whether a file can be made in a folder, or in one that can be made; asking for permissions is not enough."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_memory(available: int | None, shared: int | None, local_ranks: int, *, held: int = 0) -> Finding:
    """See that buffers of the exchange find room, and the samples of the steps in view.

    Args:
        available: free host memory in bytes, None where it is not known.
        shared: free shared memory in bytes.
        local_ranks: ranks that share this machine.
        held: bytes of samples that a rank holds, 0 where it is not known.
    """
    if available is None:
        return Finding(name="memory", level="note", text="free host memory is not known on this system")
    each = available // local_ranks
    text = f"{_gib(available)} of host memory are free, {_gib(each)} a rank"
    figures = {"available": available, "shared": shared, "local_ranks": local_ranks, "held": held}
    if held:
        text += f"; samples in view take {_gib(held)} of it"
        if held + _LEAST_MEMORY > each:
            fix = "a smaller lookahead, pixel_dtype='bfloat16', or samples that are decoded when their pack is built"
            return Finding(name="memory", level="wrong", text=text, fix=fix, figures=figures)
    if each < _LEAST_MEMORY:
        fix = "less in the loader (num_workers, prefetch_factor) or fewer ranks a machine: a step's moved samples are buffered"
        return Finding(name="memory", level="wrong", text=text, fix=fix, figures=figures)
    if shared is not None and shared < _LEAST_SHARED:
        text += f"; only {_gib(shared)} of shared memory"
        fix = "a container needs --shm-size or --ipc=host where a DataLoader has workers"
        return Finding(name="memory", level="note", text=text, fix=fix, figures=figures)
    return Finding(name="memory", text=text, figures=figures)


def free_memory() -> tuple[int | None, int | None]:
    """Return free host memory and free shared memory, in bytes."""
    available = shared = None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        room = os.statvfs("/dev/shm")
        shared = room.f_bavail * room.f_frsize
    except OSError:
        pass
    return available, shared


def check_pinned() -> Finding | None:
    """See that memory can be pinned, where there is a GPU to copy it to."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        fix = "raise the limit of locked memory (ulimit -l unlimited)"
        return Finding(name="pinned memory", level="wrong", text=f"256 MiB cannot be pinned: {error}", fix=fix)
    return Finding(name="pinned memory", text="256 MiB were pinned")


def check_alignment(*, cp: int, tp: int, sequence_parallel: bool, fp8: Any, max_tokens: int | None = None) -> Finding:
    """Say which `align` and `pack_align` a layout needs, and whether a pack's room fits them."""
    from ...collate.packs.alignment import pack_alignment

    align, pack_align = pack_alignment(cp_size=cp, tp_size=tp, sequence_parallel=sequence_parallel, fp8=fp8)
    layout = f"cp {cp}, tp {tp}{' with sequence parallelism' if sequence_parallel else ''}{f', FP8 {fp8}' if fp8 else ''}"
    text = f"{layout}: align={align}, pack_align={pack_align}"
    figures = {"align": align, "pack_align": pack_align}
    if max_tokens is None:
        return Finding(name="alignment", text=text, figures=figures)
    capacity = max_tokens * cp
    text += f"; a pack holds {capacity:,} tokens"
    if capacity < pack_align:
        fix = f"max_tokens of at least {-(-pack_align // cp)}"
        return Finding(name="alignment", level="wrong", text=text, fix=fix, figures=figures)
    if capacity % pack_align:
        text += f", of which {capacity % pack_align} can never be used"
        fix = f"max_tokens={capacity // pack_align * pack_align // cp}, which holds as much"
        return Finding(name="alignment", level="note", text=text, fix=fix, figures=figures)
    return Finding(name="alignment", text=text, figures=figures)


def check_interface(num_nodes: int) -> Finding | None:
    """See that gloo does not take the loopback where it has to reach other machines."""
    if num_nodes < 2 or os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "none"
    if address == "none" or address.startswith("127."):
        text = f"the name of this machine, {socket.gethostname()}, stands for {address}: gloo cannot reach the others there"
        return Finding(name="interface", level="wrong", text=text, fix="set GLOO_SOCKET_IFNAME to the network's interface")
    return Finding(name="interface", text=f"gloo takes {address}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
