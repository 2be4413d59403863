"""From what was rendered, processed and masked to a sample."""

from typing import Any

import numpy as np
import torch

from ...core import IGNORED
from ...models.adapter import ModelAdapter
from ...models.layout.items import flattened
from .process import Processed
from .rendered import Written


def sample_of(
    written: Written, processed: Processed, weights: np.ndarray, adapter: ModelAdapter, *, strategy: str | None
) -> dict[str, Any]:
    """Return the sample of an example.

    Args:
        written: the example, rendered.
        processed: its tokens and media.
        weights: float32 [L], weight of each token.
        adapter: the family; fields that it does not declare are left out.
        strategy: what decided the mask, None to leave it out of the sample.

    Returns:
        Fields by name, for `prepare_sample`.
    """
    ids = torch.from_numpy(processed.ids)
    trains = torch.from_numpy(weights > 0)
    fields = {name: value for name, value in written.conversation.fields.items() if name in adapter.fields}
    sample: dict[str, Any] = {
        "input_ids": ids,
        "labels": ids.where(trains, IGNORED),
        "loss_weights": torch.from_numpy(weights),
        **({"mm_token_type_ids": torch.from_numpy(processed.types)} if adapter.media_tokens else {}),
        **media_fields(processed, adapter),
        **fields,
    }
    if written.conversation.name is not None:
        sample["sample_id"] = written.conversation.name
    if strategy is not None:
        sample["mask_strategy"] = strategy
    pad = adapter.pad_token_id
    if pad and len(ids) > 1 and bool((ids[:2] == pad).all() | (ids[-2:] == pad).all()):
        sample["attention_mask"] = torch.ones_like(ids)  # these are real tokens, though they look like padding
    return sample


def media_fields(processed: Processed, adapter: ModelAdapter) -> dict[str, Any]:
    """Return what a processor returned of an example's media as tensors: declared fields, without tiles of padding."""
    given = {name: as_tensor(value) for name, value in processed.media.items() if name in adapter.fields}
    if not adapter.anchors:
        return given
    return {name: flattened(value, adapter.fields[name], given, adapter) for name, value in given.items()}


def as_tensor(value: Any) -> Any:
    """Return what a processor returned as a tensor, a batch of one example taken apart where it is a row of tokens."""
    if isinstance(value, list) and value and not isinstance(value[0], torch.Tensor | np.ndarray):
        return torch.tensor(value)
    if isinstance(value, list):
        value = np.concatenate([np.asarray(one) for one in value])
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
