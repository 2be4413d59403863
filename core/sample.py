"""A checked sample: its fields, and the layout of its text and media runs."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

#: Label of a position that learns nothing, as in torch's `cross_entropy`.
IGNORED = -100

#: Code of each modality in `mm_token_type_ids` and in `SampleLayout.runs`; 0 is text.
TYPE_CODES: dict[str, int] = {"image": 1, "video": 2, "audio": 3}

_NO_RUNS, _NO_SECONDS = np.zeros((0, 6), np.int64), np.zeros(0, np.float32)
Value = torch.Tensor | str | int | float | None


class SampleLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sample's media lie among its tokens; enough to compute positions and masks without its tensors.

    A run is a span of tokens that anchor consecutive features of one item. An image is one run; a video is one run, or one
    per frame in families that write a timestamp before each frame.

    Attributes:
        num_tokens: length L of the sample.
        runs: int64 [n, 6], ascending: start, length, type code (1 image, 2 video, 3 audio), and the run's grid t, h, w in
            patches.
        seconds: float32 [n]: seconds per temporal patch of a run's video, 0 where the family has no such value.
        num_spelled: tokens that are spelled like a media token in text, and anchor nothing.
    """

    num_tokens: int
    runs: np.ndarray
    seconds: np.ndarray
    num_spelled: int = 0

    @classmethod
    def text(cls, num_tokens: int) -> "SampleLayout":
        """Return the layout of a sample without media."""
        return cls(num_tokens=num_tokens, runs=_NO_RUNS, seconds=_NO_SECONDS)

    def type_ids(self) -> np.ndarray:
        """Return `mm_token_type_ids`, int64 [L]: 0 text, 1 image, 2 video, 3 audio."""
        types = np.zeros(self.num_tokens, np.int64)
        for start, length, code in self.runs[:, :3].tolist():
            types[start : start + length] = code
        return types


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that was checked against its declaration; what is planned, exchanged and packed.

    Attributes:
        values: declared fields that are present, defaults filled in. `input_ids`, `labels` and `loss_weights` are always
            there; tensors may be views of a received block.
        layout: text and media runs.
        shifted: `labels` and `loss_weights` already hold the target of each position (Megatron-Core's samples); otherwise
            the target of position i is `labels[i + 1]`.
        sample_id: the user's name of the sample.
    """

    values: Mapping[str, Value]
    layout: SampleLayout
    shifted: bool = False
    sample_id: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, unpadded."""
        return self.layout.num_tokens

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor field.

        Raises:
            KeyError: the field is absent.
        """
        value: Any = self.values[name]
        assert isinstance(value, torch.Tensor), name
        return value

    @property
    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the labels and weights that positions 0, 1, ... learn: all L of a shifted sample, L - 1 otherwise."""
        targets, weights = self.tensor("labels"), self.tensor("loss_weights")
        return (targets, weights) if self.shifted else (targets[1:], weights[1:])

    def target_stats(self) -> tuple[int, float]:
        """Return the number of targets that count, and the sum of their weights.

        A target counts if it is not -100 and its weight is not 0. The sum is taken in float64, so that it does not depend on
        the number of threads or on how samples are grouped.

        Example:
            >>> from evenpack.collate import prepare_sample
            >>> from evenpack.models import adapter_for
            >>> raw = {"input_ids": [1, 2, 3], "loss_weights": [1.0, 0.5, 0.0]}
            >>> prepare_sample(raw, adapter=adapter_for("text")).target_stats()
            (1, 0.5)
        """
        # On arrays, whose operations take half as long to start as those on tensors.
        targets, weights = (view.cpu().numpy() for view in self.targets)
        counted = weights if targets.min(initial=0) > IGNORED else np.where(targets != IGNORED, weights, 0)
        return int(np.count_nonzero(counted != 0)), float(counted.sum(dtype=np.float64))

    def grids(self, modality: str) -> list[tuple[int, int, int]]:
        """Return the (t, h, w) patch grids of a modality's items, in order; empty where there are none.

        In families whose processor gives no grids, they are those of the runs that end items: rows in the tower (mel frames of
        a clip), and patches of a row.
        """
        given = self.values.get(f"{modality}_grid_thw")
        if isinstance(given, torch.Tensor):
            grid: Any = given
        else:
            grid = self.layout.runs[(self.layout.runs[:, 2] == TYPE_CODES[modality]) & (self.layout.runs[:, 3] > 0), 3:]
        return [(t, h, w) for t, h, w in grid.tolist()]
