"""Examples that cannot be encoded, each error naming the example."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from ...core import SampleError


class ConversationError(SampleError):
    """A conversation of the wrong form, or one that the chat template refuses."""


class UnreadableMediaError(SampleError):
    """A media item that is missing, cannot be read, or cannot be processed with what is installed."""


class NoMediaReaderError(UnreadableMediaError):
    """Media that the installed packages or the encoder's settings cannot read, however good the item is: never dropped."""


@contextlib.contextmanager
def naming_example(example: Any, number: int, *, counted: bool = False) -> Iterator[str]:
    """Name an example in the errors raised inside, those of libraries too.

    Args:
        example: what is encoded; its `sample_id` names it best.
        number: its number.
        counted: the number counts what this process encoded, and so means nothing without the process.

    Yields:
        The name for messages.

    Raises:
        SampleError: any other exception, chained as its cause.
    """
    where = f"example {number}"
    if counted:
        worker = get_worker_info()
        rank = f"rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""
        place = ", ".join(part for part in (rank, f"worker {worker.id}" if worker else "") if part)
        where = f"{place}: {where} of this process" if place else where
    name = example.get("sample_id") if isinstance(example, Mapping) else None
    if name is not None:
        where = f"{where} ({name!r})"
    try:
        yield where
    except SampleError:
        raise
    except Exception as error:
        raise SampleError(f"{where}: {type(error).__name__}: {error}") from error
