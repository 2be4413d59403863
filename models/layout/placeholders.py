"""Placeholders that no item claims: text may spell a media token, but not between the markers that a processor writes."""

from collections.abc import Mapping, Sequence

import numpy as np

from ...core import MediaMismatchError
from ..adapter import ModelAdapter


def refuse_unclaimed(
    free: Sequence[tuple[int, int]],
    ids: np.ndarray,
    masks: Mapping[str, np.ndarray],
    counts: Mapping[str, int],
    adapter: ModelAdapter,
    where: str,
) -> None:
    """Refuse media tokens that stand where a processor puts an item, in a sample that has no item for them.

    Text spells a media token by itself. Behind a start marker and before an end marker (or the end of the sample, where a
    sample was cut) it is a placeholder whose media got lost, and would be trained as text. In families without markers, only
    `mm_token_type_ids` can tell, so each such run is refused.

    Args:
        free: (start, length) of each run of media tokens that anchors nothing.
        ids: integers [L].
        masks: modality to where its tokens stand, bool [L].
        counts: modality to the number of the sample's items.
        adapter: the family.
        where: how errors name the sample.

    Raises:
        MediaMismatchError: such a run; its tokens, its place and the missing fields are named.
    """
    brackets = [adapter.brackets(name) for name in adapter.media_tokens]
    starts, ends = {before[-1] for before, _ in brackets if before}, {after[0] for _, after in brackets if after}
    for start, length in free:
        stop = start + length
        name = next(name for name, mask in masks.items() if mask[start])
        fields = f"{' and '.join(_item_fields(name, adapter))} are missing or too few"
        if not adapter.brackets(name)[0]:  # no markers would tell text from a place of media
            raise MediaMismatchError(
                f"{where}: none of the sample's {counts.get(name, 0)} {name} items has the {length} {name} tokens from "
                f"position {start} on: {fields}; where text spells the token, mm_token_type_ids of 0 say so"
            )
        if start == 0 or int(ids[start - 1]) not in starts or not (stop == len(ids) or int(ids[stop]) in ends):
            continue
        after = "the end of the sample" if stop == len(ids) else f"the end marker {ids[stop]}"
        raise MediaMismatchError(
            f"{where}: {length} media tokens from position {start} (of {len(ids)}) stand between the start marker "
            f"{ids[start - 1]} and {after}, but none of the sample's {counts.get(name, 0)} {name} items is theirs: "
            f"{fields}; if text spells these tokens, "
            "give mm_token_type_ids (0 there)"
        )


def _item_fields(modality: str, adapter: ModelAdapter) -> list[str]:
    """Return the fields that bring a modality's items; seconds per grid have a default, so they cannot be what is missing."""
    media = adapter.fields.of_kind("media")
    return [field.name for field in media if field.modality == modality and field.name != adapter.seconds_field]
