"""The scheduler's state: rank-local, plain data, exact at every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..models import ModelAdapter
from .sources import LoaderSource
from .stages.blocks import read_block
from .stages.collect import Position
from .stages.describe import Described, Describer

VERSION = 2
_KEYS = (
    "version",
    "rank",
    "num_ranks",
    "step",
    "plan",
    "dtypes",
    "in_epoch",
    "source",
    "waiting",
    "carried",
    "lookahead",
    "ahead",
    "closing",
    "index",
    "exhausted",
    "started",
    "heavy",
)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where a scheduler stands after the last step that it handed out.

    Attributes:
        step: number of the next step.
        plan: digest of the last plan.
        dtypes: dtype codes of the fields of free dtype.
        in_epoch: whether the epoch continues.
        position: where the reader stands.
        heavy: most that a part of a group may cost, as the last plan had it.
        lookahead: W of the run, which the ages of carried samples refer to.
        ahead: steps that the carried samples are for.
        closing: whether only these are left of the epoch, though some sources go on.
    """

    step: int
    plan: int
    dtypes: bytes
    in_epoch: bool
    position: Position
    heavy: int | None = None
    lookahead: int = 1
    ahead: int = 0
    closing: bool = False


def with_in_flight(checkpoint: Checkpoint, fresh: Sequence[Described], waiting: Sequence[Described]) -> Checkpoint:
    """Return a checkpoint that holds everything read since, for a source that cannot go back.

    Args:
        checkpoint: where the last step that was handed out ends.
        fresh: what was read for the steps prepared since, in order.
        waiting: what was read and belongs to no step yet.
    """
    # Before the first step of an epoch, `checkpoint` is the end of the one before, where the source had ended.
    exhausted = checkpoint.in_epoch and checkpoint.position.exhausted
    position = msgspec.structs.replace(checkpoint.position, waiting=(*fresh, *waiting), exhausted=exhausted, started=True)
    return msgspec.structs.replace(checkpoint, in_epoch=True, position=position)


def without_view(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint for a run with another `lookahead`: samples that were carried are read first, in their order."""
    position = checkpoint.position
    oldest_first = sorted(position.carried, key=lambda item: -item.age)
    waiting = (*(item.marked(age=0) for item in oldest_first), *position.waiting)
    position = msgspec.structs.replace(position, waiting=waiting, carried=())
    return msgspec.structs.replace(checkpoint, position=position, ahead=0)


def to_state(checkpoint: Checkpoint, *, rank: int, num_ranks: int, adapter: ModelAdapter) -> dict[str, Any]:
    """Return a checkpoint as plain data: numbers, bytes, and the source's own state."""
    position = checkpoint.position
    return {
        "version": VERSION,
        "rank": rank,
        "num_ranks": num_ranks,
        "adapter": adapter.name,
        "fields": [field.name for field in adapter.fields],
        "step": checkpoint.step,
        "plan": checkpoint.plan,
        "dtypes": list(checkpoint.dtypes),
        "in_epoch": checkpoint.in_epoch,
        "source": position.source,
        "waiting": [_bytes_of(item) for item in position.waiting],
        "carried": [(_bytes_of(item), item.age) for item in position.carried],
        "lookahead": checkpoint.lookahead,
        "ahead": checkpoint.ahead,
        "closing": checkpoint.closing,
        "index": position.index,
        "exhausted": position.exhausted,
        "started": position.started,
        "heavy": checkpoint.heavy,
    }


def from_state(state: Mapping[str, Any], describer: Describer) -> Checkpoint:
    """Rebuild a checkpoint of a state that was checked.

    Raises:
        ValueError: a state of other fields.
        CorruptBlockError: a stored sample that was changed.
    """
    if len(state["dtypes"]) != len(describer.free_fields):
        raise ValueError(
            f"the state holds the dtypes of {len(state['dtypes'])} fields of free dtype, this scheduler has "
            f"{len(describer.free_fields)} {describer.free_fields}: it is of another adapter, or has other fields"
        )
    return Checkpoint(
        step=state["step"],
        plan=state["plan"],
        dtypes=bytes(state["dtypes"]),
        in_epoch=state["in_epoch"],
        lookahead=state["lookahead"],
        ahead=state["ahead"],
        closing=state["closing"],
        position=Position(
            source=state["source"],
            waiting=tuple(_sample_of(data, describer) for data in state["waiting"]),
            carried=tuple(_sample_of(data, describer).marked(age=age) for data, age in state["carried"]),
            index=state["index"],
            exhausted=state["exhausted"],
            started=state["started"],
        ),
        heavy=state["heavy"],
    )


def check_is_state(state: Any, adapter: ModelAdapter) -> None:
    """Raise `ValueError` for what is no state, or one of another version or other fields."""
    what = "not a state of PackingScheduler.state_dict()"
    if not isinstance(state, Mapping):
        raise ValueError(f"{what}: it is a {type(state).__name__}")
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ValueError(f"{what}: it lacks {missing}")
    if state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']}, this is version {VERSION}")
    if "fields" not in state:
        return  # of a version before fields were noted
    then, now = list(state["fields"]), [field.name for field in adapter.fields]
    differs = {
        f"adapter is {state['adapter']!r}, here {adapter.name!r}": state["adapter"] != adapter.name,
        f"fields missing here: {[name for name in then if name not in now]}": not {*then} <= {*now},
        f"further fields here: {[name for name in now if name not in then]}": not {*now} <= {*then},
    }
    if any(differs.values()):
        raise ValueError(
            f"the state is of another scheduler: {'; '.join(text for text, it_does in differs.items() if it_does)}"
        )


def check_same_ranks(state: Mapping[str, Any], rank: int, num_ranks: int) -> None:
    """Raise `ValueError` unless a state was saved by this rank of as many."""
    if state.get("num_ranks") != num_ranks:
        raise ValueError(
            f"the state was saved on {state.get('num_ranks')} ranks, this job has {num_ranks}: "
            "pass the states of all ranks to load_state_dicts"
        )
    if state.get("rank") != rank:
        raise ValueError(f"the state was saved by rank {state.get('rank')}, this is rank {rank}: states are rank-local")


def reshard(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return this rank's share of the states of another number of ranks, all but the source's.

    Samples in flight are dealt out in turn, in (rank, order) order, so that each goes to exactly one rank.

    Raises:
        ValueError: states that are incomplete, or were not saved at the same step.
    """
    ordered = sorted(states, key=lambda state: state.get("rank", -1))
    ranks = [state.get("rank") for state in ordered]
    expected = ordered[0].get("num_ranks") if ordered else 0
    if ranks != list(range(expected or 0)) or not ranks:
        raise ValueError(f"states of ranks {ranks} are not those of all {expected} ranks that saved them")
    for key in ("version", "step", "plan", "in_epoch", "lookahead", "ahead", "closing"):
        values = {state[key] for state in ordered}
        if len(values) > 1:
            raise ValueError(f"the states were not saved together: {key} is {sorted(values)}")
    waiting = [data for state in ordered for data in state["waiting"]]
    carried = sorted((item for state in ordered for item in state["carried"]), key=lambda item: -item[1])  # oldest first
    return {
        **ordered[0],
        "rank": rank,
        "num_ranks": num_ranks,
        "dtypes": [max(codes) for codes in zip(*(state["dtypes"] for state in ordered), strict=True)],
        "source": None,
        "waiting": waiting[rank::num_ranks],
        "carried": carried[rank::num_ranks],
        "index": sum(state["index"] for state in ordered) // num_ranks,
        "exhausted": all(state["exhausted"] for state in ordered),
        "started": any(state["started"] for state in ordered),
    }


def divide_source(source: Any, states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int, *, name: str) -> None:
    """Split what the ranks of another number had not read yet across the ranks of this job.

    Args:
        source: this rank's source; one without positions in the states stands where the user left it.
        states: of all ranks, as `reshard` takes them.
        rank: this rank.
        num_ranks: R of this job.
        name: what the user calls the source.

    Raises:
        ValueError: a source that cannot.
    """
    # A source that has ended stands at the beginning of its next epoch: nothing of this one is left there to divide.
    going = [state for state in states if not (state["in_epoch"] and state["exhausted"])]
    positions = [state["source"] for state in sorted(going, key=lambda state: state["rank"])]
    if all(position is None for position in positions):
        return
    if isinstance(source, LoaderSource):
        # Between epochs nothing is left to divide, also where `on_exhausted="stop"` left an epoch before its end.
        inside = all(state["in_epoch"] for state in going)
        source.divide(
            positions if inside else [{**position, "in_epoch": False} for position in positions], rank=rank, num_ranks=num_ranks
        )
        return
    divide = getattr(source, "load_state_dicts", None)
    if divide is None:
        raise ValueError(
            f"the states are of {len(states)} ranks, this job has {num_ranks}, and {name} has no load_state_dicts to split "
            "what those ranks had not read yet: read a map-style dataset through DataLoader(dataset, batch_size=None, "
            "sampler=DistributedSampler(dataset)), or resume on as many ranks"
        )
    divide(positions)


def _bytes_of(item: Described) -> bytes:
    data = torch.empty(item.block.nbytes, dtype=torch.uint8, device="cpu").numpy()
    item.block.write(data, row=0, digest=0)
    return data.tobytes()


def _sample_of(data: bytes, describer: Describer) -> Described:
    # A copy, as bytes cannot be written to and a tensor over them would be.
    return describer.described(read_block(torch.frombuffer(bytearray(data), dtype=torch.uint8)), "saved sample")
