"""Megatron-Core on a machine without a GPU: the few places where it asks for CUDA, answered for as long as a block runs."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _OnHost(TorchFunctionMode):
    """Builds on the host what is asked for on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron-Core run on the host inside the block; nothing changes where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: None),
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock),
        mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
        # 0.16 looks for Transformer Engine's multiplication without asking whether it is there.
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        _OnHost(),
    ):
        yield
