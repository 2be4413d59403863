"""Samples of one group: planned, moved and packed together, with what they have in common held once."""

from collections.abc import Sequence

import msgspec
import numpy as np

from .sample import TYPE_CODES, Sample, SampleLayout


class SampleGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that share their first tokens, held as a tree of depth 1: the prefix once, then what is each member's own.

    Attributes:
        members: the first one whole. The values of the others hold what is their own alone: tokens from `prefix` on, and the
            media behind it. Layouts and per-sample values are those of the whole samples.
        prefix: tokens S that all members have in common and that are held once, with their media; 0 where nothing is shared.
        num_groups: groups that this one counts for: 1, or 0 for a further part of a group that is too large for one.

    Example:
        >>> from evenpack.collate import fold_group, prepare_sample
        >>> from evenpack.models import adapter_for
        >>> raws = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]},
        ...         {"input_ids": [1, 2, 3, 9], "labels": [-100, -100, -100, 9]}]
        >>> adapter = adapter_for("text")
        >>> group = fold_group([prepare_sample(raw, adapter=adapter) for raw in raws], adapter, groups="prompt")
        >>> group.prefix, group.num_tokens, group.members[1].tensor("input_ids").tolist()
        (2, 6, [3, 9])
    """

    members: tuple[Sample, ...]
    prefix: int = 0
    num_groups: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the group takes in a row, unpadded: the prefix once."""
        return self.prefix + sum(member.num_tokens - self.prefix for member in self.members)

    @property
    def sample_id(self) -> str | int | None:
        """The name of the first member."""
        return self.members[0].sample_id

    def target_stats(self) -> tuple[int, float]:
        """Return the number of targets of the row that count, and the sum of their weights over all members."""
        found = [member.target_stats() for member in self.members]
        return sum(count for count, _ in found), float(sum(weight for _, weight in found))

    @property
    def shared_layout(self) -> SampleLayout:
        """Layout of the prefix; never inside a run."""
        layout = self.members[0].layout
        inside = layout.runs[:, 0] < self.prefix
        return SampleLayout(num_tokens=self.prefix, runs=layout.runs[inside], seconds=layout.seconds[inside])


def members_of(sample: Sample | SampleGroup) -> tuple[Sample, ...]:
    """Return the members of a group, or the sample itself."""
    return sample.members if isinstance(sample, SampleGroup) else (sample,)


def num_groups_of(sample: Sample | SampleGroup) -> int:
    """Return how many groups a sample or a part of a group counts for."""
    return sample.num_groups if isinstance(sample, SampleGroup) else 1


def layout_grids(layout: SampleLayout) -> list[tuple[int, int, int]]:
    """Return the (t, h, w) grids of a layout's runs, by modality; frames that are written apart are grids of their own."""
    runs = layout.runs[layout.runs[:, 3] > 0]
    ordered = runs[np.argsort(runs[:, 2], kind="stable"), 3:]
    return [(t, h, w) for t, h, w in ordered.tolist()]


def media_codes(samples: Sequence[Sample]) -> set[int]:
    """Return the type codes of all samples' media."""
    return {code for sample in samples for code in sample.layout.runs[:, 2].tolist()} & set(TYPE_CODES.values())
