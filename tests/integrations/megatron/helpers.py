"""Megatron-Core on CPU, samples and settings that its tests share."""

import dataclasses
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.packed_seq_params")
    # Once, before ranks are forked: importing takes longer than any of the tests.
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel
    import megatron.core.rerun_state_machine  # noqa: F401

from evenpack.integrations.megatron import get_packed_batch, wrap_data_iterator
from evenpack.scheduler import SchedulerConfig
from evenpack.scheduler.testing import run_ranks

VOCABULARY = 64


class Samples:
    """A data iterator that counts what was taken from it."""

    def __init__(self, items: list[Any]) -> None:
        self._items = iter(items)
        self.taken = 0

    def __iter__(self) -> "Samples":
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.taken += 1
        return item


def megatron_sample(length: int, number: int, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Return a sample as Megatron-Core's datasets make it: shifted, padded, described by its two lengths."""
    padded = -(-length // multiple) * multiple
    rng = random.Random(number)
    tokens = [rng.randrange(1, VOCABULARY) for _ in range(length + 1)]
    tail = [0] * (padded - length)
    return {
        "tokens": torch.tensor(tokens[:-1] + tail),
        "labels": torch.tensor(tokens[1:] + tail),
        "loss_mask": torch.tensor([float(rng.random() < 0.8) for _ in range(length)] + [0.0] * len(tail)),
        "position_ids": torch.arange(padded),
        "original_seq_len": torch.tensor([length], dtype=torch.int32),
        "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
    }


def own_sample(length: int, name: Any) -> dict[str, Any]:
    """Return a text sample under our own names."""
    rng = random.Random(str(name))
    return {"input_ids": torch.tensor([rng.randrange(1, VOCABULARY) for _ in range(length)]), "sample_id": name}


def own_samples(lengths: list[int]) -> list[dict[str, Any]]:
    """Return text samples of these lengths, named by them."""
    return [own_sample(length, length) for length in lengths]


def settings(**more: Any) -> Any:
    """Return what the wrapper reads of a Megatron-Core config."""
    defaults = dict(
        max_seqlen_per_dp_cp_rank=64,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        sequence_parallel=False,
        virtual_pipeline_model_parallel_size=None,
        microbatch_group_size_per_vp_stage=None,
        expert_model_parallel_size=1,
        mtp_num_layers=None,
    )
    return SimpleNamespace(**{**defaults, **more})


def on_ranks(fn: Any, num_ranks: int, *, order: str = "tp-cp-ep-dp-pp", timeout: float = 60, **sizes: int) -> list[Any]:
    """Run `fn()` on forked gloo ranks with Megatron-Core's parallel state up; return its results."""

    def body(rank: int, size: int) -> Any:
        from megatron.core import parallel_state

        names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "vpp": "virtual_pipeline_model"}
        given = {f"{names[name]}_parallel_size": value for name, value in sizes.items()}
        parallel_state.initialize_model_parallel(order=order, **given)
        return fn()

    return run_ranks(body, num_ranks, backend="gloo", timeout=timeout)


def place() -> SimpleNamespace:
    """Return where the calling rank stands."""
    from megatron.core import parallel_state as ps

    return SimpleNamespace(
        dp=ps.get_data_parallel_rank(),
        tp=ps.get_tensor_model_parallel_rank(),
        cp=ps.get_context_parallel_rank(),
        pp=ps.get_pipeline_model_parallel_rank(),
        reads=not (
            ps.get_tensor_model_parallel_rank() or ps.get_context_parallel_rank() or ps.get_pipeline_model_parallel_rank()
        ),
    )


def wrap(items: Any, count: int, config: Any = None, **more: Any) -> tuple[Any, int, int, int]:
    """Wrap an iterator that only the reader has."""
    return wrap_data_iterator(items if place().reads else None, config or settings(), count, **more)


def packs_of(iterator: Any, count: int) -> list[dict[str, Any]]:
    """Return the micro-batches of a wrapped iterator as plain lists, which travel between processes."""
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in next(iterator).items()}
        for _ in range(count)
    ]


def taken(
    items: list[Any], *, valid: str = "real", config: Any = None, adapter: Any = "text", fields: Any = (), **plan: Any
) -> Any:
    """Return a function for `on_ranks`: the fields of the first pack of one step of `items`, one entry per model chunk.

    Args:
        items: samples that every reader has.
        valid: of `get_packed_batch`.
        config: what the wrapper reads of a Megatron-Core config.
        adapter: of `wrap_data_iterator`.
        fields: of `wrap_data_iterator`.
        **plan: settings of the scheduler; without any they come from `config`.
    """

    def body() -> list[dict[str, Any]]:
        from megatron.core import parallel_state

        vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        source = Samples(items) if place().reads else None
        given = SchedulerConfig(**{"max_tokens": 4096, "samples_per_step": 1, **plan}) if config is None else None
        iterator, _, _, _ = wrap_data_iterator(
            source if vpp == 1 else [source] * vpp,
            config or settings(),
            len(items),
            settings=given,
            adapter=adapter,
            fields=fields,
        )
        return [row_of(get_packed_batch(iterator, vp_stage=stage if vpp > 1 else None, valid=valid)) for stage in range(vpp)]

    return body


def row_of(batch: Any) -> dict[str, Any]:
    """Return what `get_packed_batch` gave as plain lists, which travel between processes."""
    *tensors, params, mask = batch
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    row = {name: None if tensor is None else tensor.tolist() for name, tensor in zip(names, tensors, strict=True)}
    known = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    row["params"] = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in known.items() if value is not None
    }
    row["same"] = params.cu_seqlens_q is params.cu_seqlens_q_padded and params.cu_seqlens_kv is params.cu_seqlens_kv_padded
    return row | {"padding_mask": mask.tolist()}
