"""A group folded: what its members have in common found, and taken out of all but the first."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
import torch

from ...core import IGNORED, FieldShapeError, OversizeSampleError, Sample, SampleGroup
from ...models.adapter import ModelAdapter
from .truncate import truncate_sample

Groups = Literal["split", "together", "prompt", "prefix"]

#: Fields in which the members of a group may differ before they part: targets, which are merged or ignored there.
_MERGED = ("labels", "loss_weights")


def fold_group(members: Sequence[Sample], adapter: ModelAdapter, *, groups: Groups = "prompt") -> SampleGroup:
    """Fold samples into one group.

    The prefix ends one token before the members part, so that each branch begins with its own copy of the last common token:
    it predicts the branch's first own token, and every slot of a row has one target. It never ends inside a media item, and
    holds no item in which the members differ.

    Args:
        members: prepared samples, at least one.
        adapter: the model family.
        groups: "together" shares nothing; "prompt" what all have in common before the first target of any of them; "prefix"
            targets too, whose weights add up: exact for losses that are linear in a slot's cross entropy.

    Raises:
        FieldShapeError: members that differ in their fields, or of which some have shifted targets.
        ValueError: another value of `groups`, or no member.
    """
    if groups not in get_args(Groups)[1:] or not members:
        kinds = get_args(Groups)[1:]
        raise ValueError(f"fold_group needs groups in {kinds} and a member, got {groups!r} and {len(members)} members")
    return _folded(members, _prefix_of(members, adapter, groups), adapter, groups)


def _prefix_of(members: Sequence[Sample], adapter: ModelAdapter, groups: Groups) -> int:
    """Return how many tokens members are folded at."""
    _check_alike(members, adapter)
    return 0 if groups == "together" or len(members) < 2 else _shared_length(members, adapter, trained=groups == "prefix")


def _folded(members: Sequence[Sample], prefix: int, adapter: ModelAdapter, groups: Groups) -> SampleGroup:
    """Fold members at a prefix that they share."""
    if not prefix or len(members) == 1:
        return SampleGroup(members=tuple(members))
    first = _merged(members, prefix) if groups == "prefix" else members[0]
    rows = _rows_within(first, prefix, adapter)
    own = [_without_prefix(member, prefix, rows, adapter) for member in members[1:]]
    return SampleGroup(members=(first, *own), prefix=prefix)


def shares_prefixes(adapter: ModelAdapter) -> bool:
    """Whether the members of a group may share tokens: attention is causal, so that a prefix does not see its branches."""
    return adapter.bidirectional is None


def _check_alike(members: Sequence[Sample], adapter: ModelAdapter) -> None:
    """Raise `FieldShapeError` unless members have the same token fields, and targets of one kind."""
    first = members[0]
    names = [{field.name for field in adapter.fields.of_kind("token") if field.name in one.values} for one in members]
    for at, other in enumerate(members):
        if names[at] != names[0]:
            raise FieldShapeError(f"members 0 and {at} of a group differ: only one has {sorted(names[at] ^ names[0])}")
        if first.shifted != other.shifted:
            raise FieldShapeError(f"members 0 and {at} of a group differ: the targets of only one are shifted")


def _shared_length(members: Sequence[Sample], adapter: ModelAdapter, *, trained: bool) -> int:
    """Return how many tokens of the members may be held once."""
    first, stop = members[0], min(member.num_tokens for member in members)
    compared = [
        field
        for field in adapter.fields.of_kind("token")
        if field.name in first.values and field.name not in _MERGED and (trained or field.name == "input_ids" or field.to_model)
    ]
    for other in members[1:]:
        for field in compared:
            stop = min(stop, _first_difference(first.tensor(field.name), other.tensor(field.name), field.axis, stop))
        stop = min(stop, _first_run_apart(first, other, stop))
    stop -= 1
    if trained:
        stop = min(stop, *(_first_conflict(first, other, stop) for other in members[1:]))
    else:
        for member in members:
            stop = _first_target(member, max(stop, 0))
    return _before_other_media(members, stop, adapter)


def _first_difference(one: torch.Tensor, other: torch.Tensor, axis: int, stop: int) -> int:
    """Return where two tensors differ first along an axis; `stop` where they agree so far."""
    if one is other or stop <= 0:
        return stop
    # On arrays, whose operations take half as long to start as those on tensors.
    views = [tensor.narrow(axis, 0, stop).movedim(axis, 0).cpu().numpy() for tensor in (one, other)]
    differ = (views[0] != views[1]).reshape(stop, -1)
    at = int(differ.argmax()) // differ.shape[1]
    return at if differ[at].any() else stop


def _first_run_apart(one: Sample, other: Sample, stop: int) -> int:
    """Return the start of the first run, before `stop`, that two samples do not share; `stop` where there is none."""
    runs = [sample.layout.runs[sample.layout.runs[:, 0] < stop] for sample in (one, other)]
    seconds = [sample.layout.seconds[: len(found)] for sample, found in zip((one, other), runs, strict=True)]
    for at in range(max(map(len, runs))):
        if at >= min(map(len, runs)) or (runs[0][at] != runs[1][at]).any() or seconds[0][at] != seconds[1][at]:
            return min(int(found[at][0]) for found in runs if at < len(found))
    return stop


def _first_target(sample: Sample, stop: int) -> int:
    """Return the first position before `stop` that learns something; `stop` where none does."""
    targets, weights = (view[:stop].cpu().numpy() for view in sample.targets)
    trains = (targets != IGNORED) & (weights != 0)
    return int(trains.argmax()) if trains.any() else stop


def _first_conflict(one: Sample, other: Sample, stop: int) -> int:
    """Return the first position, before `stop`, at which two samples learn different tokens."""
    a, b = (sample.targets[0][: max(stop, 0)] for sample in (one, other))
    size = min(len(a), len(b))
    differ = ((a[:size] != b[:size]) & (a[:size] != IGNORED) & (b[:size] != IGNORED)).cpu().numpy()
    return int(differ.argmax()) if differ.any() else stop


def _before_other_media(members: Sequence[Sample], stop: int, adapter: ModelAdapter) -> int:
    """Return the longest prefix up to `stop` that ends in no media item and whose items are the same in all members."""
    if not any((member.layout.runs[:, 0] < stop).any() for member in members):
        return max(0, stop)
    while stop > 0:
        try:
            cut = [truncate_sample(member, stop, adapter) for member in members]
        except OversizeSampleError:  # the samples begin with an item that does not fit
            return 0
        stop = cut[0].num_tokens
        runs = cut[0].layout.runs
        if all(_same_media(cut[0], other, adapter) for other in cut[1:]) and {one.num_tokens for one in cut} == {stop}:
            return stop
        stop = int(runs[-1, 0]) if len(runs) else 0
    return 0


def _same_media(one: Sample, other: Sample, adapter: ModelAdapter) -> bool:
    """Whether two prefixes hold the same rows of media; the same memory is not read."""
    for field in adapter.fields.of_kind("media"):
        a, b = one.values.get(field.name), other.values.get(field.name)
        if (a is None) != (b is None):
            return False
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if field.rows in ("sample", "free"):
                return False  # nothing says which of its rows belong to which item
            same = a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))
            if not same:
                return False
    return True


def _rows_within(sample: Sample, prefix: int, adapter: ModelAdapter) -> dict[str, int]:
    """Return how many rows of each media field belong to a prefix."""
    if not (sample.layout.runs[:, 0] < prefix).any():
        return {}
    cut = truncate_sample(sample, prefix, adapter)
    return {
        field.name: cut.tensor(field.name).shape[field.axis]
        for field in adapter.fields.of_kind("media")
        if field.name in cut.values
    }


def _without_prefix(member: Sample, prefix: int, rows: dict[str, int], adapter: ModelAdapter) -> Sample:
    """Return a member without the tokens and media of the prefix; its layout stays whole."""
    values = dict(member.values)
    for name, value in member.values.items():
        field = adapter.fields[name]
        if not isinstance(value, torch.Tensor) or field.kind == "sample":
            continue
        start = prefix if field.kind == "token" else rows.get(name, 0)
        size = value.shape[field.axis] - start
        if field.kind == "media" and not size:
            del values[name]
        elif start:
            values[name] = value.narrow(field.axis, start, size).contiguous()
    return msgspec.structs.replace(member, values=values)


def _merged(members: Sequence[Sample], prefix: int) -> Sample:
    """Return the first member with the targets of all in the prefix: their weights add up."""
    first = members[0]
    offset = 0 if first.shifted else 1  # a target lies one place behind the position that learns it
    labels, weights = first.tensor("labels").clone(), first.tensor("loss_weights").clone()
    views = [[tensor[:prefix] for tensor in member.targets] for member in members]
    learned = torch.stack([torch.where(targets != IGNORED, weight, 0.0) for targets, weight in views])
    labels[offset : offset + prefix] = torch.stack([targets for targets, _ in views]).amax(dim=0)
    weights[offset : offset + prefix] = learned.sum(dim=0)
    return msgspec.structs.replace(first, values={**first.values, "labels": labels, "loss_weights": weights})


def parts_of(
    members: Sequence[Sample],
    adapter: ModelAdapter,
    *,
    groups: Groups,
    fits: Callable[[SampleGroup], bool],
    is_heavy: Callable[[SampleGroup], bool] = lambda part: False,
) -> list[SampleGroup]:
    """Fold a group into the fewest parts that fit, each with its copy of the prefix; a pair, and "together", stay whole.

    Members are dealt longest first, each to the part with the fewest tokens so far, and keep their order within a part. Heavy
    parts are taken apart further, unless the copies of the prefix would be more than half of all tokens: then the work that is
    added outweighs what the planner could gain.

    Args:
        members: prepared samples.
        adapter: the model family.
        groups: as for `fold_group`.
        fits: says whether a part has room in a pack; a part of one member is not asked.
        is_heavy: says whether a part costs so much that the planner has too little choice.
    """
    prefix = _prefix_of(members, adapter, groups)
    parts = [_folded(members, prefix, adapter, groups)]
    if groups == "together" or len(members) <= 2:
        return parts
    own = sum(member.num_tokens - prefix for member in members)
    for count in range(2, len(members) + 1):
        has_room = all(len(part.members) == 1 or fits(part) for part in parts)
        if has_room and (2 * count * prefix > own or not any(len(part.members) > 1 and is_heavy(part) for part in parts)):
            break
        parts = [_folded(part, prefix, adapter, groups) for part in _dealt(members, count)]
    return [msgspec.structs.replace(part, num_groups=int(not at)) for at, part in enumerate(parts)]


def _dealt(members: Sequence[Sample], count: int) -> list[list[Sample]]:
    lengths = np.array([member.num_tokens for member in members])
    part, load = np.zeros(len(members), np.int64), np.zeros(count, np.int64)
    for at in np.argsort(-lengths, kind="stable").tolist():
        part[at] = int(load.argmin())
        load[part[at]] += lengths[at]
    return [[member for member, number in zip(members, part.tolist(), strict=True) if number == one] for one in range(count)]
