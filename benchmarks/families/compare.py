"""A pack through a prepared model against the stock model on each sample alone: logits and gradients, in fp64."""

import inspect
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from evenpack.collate import pack_samples
from evenpack.models import ModelAdapter, adapter_for, dummy_sample, prepare_model

from .tiny import TOKEN, TWIN, VOCAB, random_sample, tiny_model, with_prefix


class WithoutCasts(TorchFunctionMode):
    """Leaves double precision where models cast a part (norms, routers, rotary tables) to single precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, casts from float64 to float32 left out."""
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if func is torch.Tensor.float:
            return args[0].double()
        if double and torch.float32 in (*args[1:], kwargs.get("dtype")):
            args = (args[0], *(torch.float64 if one is torch.float32 else one for one in args[1:]))
            kwargs |= {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else {}
        return func(*args, **kwargs)


#: Models that go by ids alone wherever they place features: text that spells the media token is refused by name.
BY_IDS = ("qwen2_audio",)
#: Models that read a spelled media token as padding, and whose packs read it as text.
AS_PADDING = ("gemma3", "gemma3n", "gemma4")


def samples_for(adapter: ModelAdapter, seed: int = 0) -> list[dict[str, Any]]:
    """Return a text, a sample with one image, one with two of other sizes, and a text that spells the media token."""
    rng = np.random.default_rng(seed)
    raws = [random_sample(rng, adapter, images) for images in (0, 1, 2)]
    ids = torch.tensor([5, TOKEN, TOKEN, 6, 7])
    spelled = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}
    if "token_type_ids" in adapter.fields:
        spelled = with_prefix(spelled)
    return raws if adapter.name in BY_IDS else [*raws, spelled]


def alone(model: Any, raw: dict[str, Any]) -> torch.Tensor:
    """Return a stock model's logits [L, V] of one sample, called as its users call it."""
    taken = inspect.signature(model.forward).parameters
    ids, types = raw["input_ids"], raw["mm_token_type_ids"]
    if model.config.model_type in AS_PADDING:
        ids = torch.where((types == 0) & (ids == TOKEN), TWIN, ids)
    given = {"token_type_ids": types, **raw, "input_ids": ids}
    given.pop("labels", None)
    given = {name: value[None] if value.shape == ids.shape else value for name, value in given.items() if name in taken}
    return model(**given, attention_mask=torch.ones(1, len(ids), dtype=torch.int64), use_cache=False).logits[0]


def packed(model: Any, raws: list[dict[str, Any]], adapter: ModelAdapter) -> list[torch.Tensor]:
    """Return a prepared model's logits of each sample of a pack, which ends in a dummy of each modality."""
    dummies = [dummy_sample(name, adapter, torch.float64) for name in adapter.dummy_grids]
    batch = pack_samples([*raws, *dummies], adapter=adapter, num_dummies=len(dummies))
    logits = model(**batch.forward_kwargs(model)).logits[0]
    starts = batch.cu_seqlens_q.tolist()
    return [logits[start : start + len(raw["input_ids"])] for start, raw in zip(starts, raws, strict=False)]


def gradients(model: Any, logits: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss with a different weight at every logit, so that no error cancels."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(7)
    sum((part * torch.randn(part.shape, generator=generator, dtype=part.dtype)).sum() for part in logits).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if model.config.model_type in AS_PADDING:  # the media token and its twin are one
        for gradient in found.values():
            if gradient.ndim == 2 and len(gradient) == VOCAB:
                gradient[TOKEN] += gradient[TWIN]
                gradient[TWIN] = 0
    return found


def largest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


def differences(family: str) -> tuple[float, float]:
    """Return the largest difference of a logit, and of a gradient relative to the largest, of a pack and its samples alone."""
    stock, prepared = tiny_model(family), prepare_model(tiny_model(family))
    adapter = adapter_for(stock.config)
    raws = samples_for(adapter)
    want, got = [alone(stock, raw) for raw in raws], packed(prepared, raws, adapter)
    expected, actual = gradients(stock, want), gradients(prepared, got)
    assert expected.keys() <= actual.keys(), expected.keys() - actual.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    common = list(expected)
    return largest(want, got), largest([expected[name] for name in common], [actual[name] for name in common]) / scale
