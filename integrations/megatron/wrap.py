"""`wrap_data_iterator`: one global batch of Megatron-Core, packed and balanced."""

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from ...collate.packs.megatron import check_causal
from ...core import EvenpackError, Field
from ...models import ModelAdapter, adapter_for
from ...scheduler import PackedStep, SchedulerConfig, StepCallback, plan_step
from ...scheduler.plan.settings import check_int
from ...scheduler.stages.describe import SampleCost
from ...scheduler.stages.planning import Planner
from ...scheduler.telemetry.callbacks import check_callbacks
from .codec import decode, encode
from .fields import fields_of, parts_of, selected
from .ranks import Ranks
from .replica import CallInfo, ReplicaLink, check_calls, error_info, error_of, link_of, named
from .session import IteratorSession, SessionArguments, own_iterator, session_of
from .settings import scheduler_config


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a global batch, equal on all ranks; `iterator.facts` of the iterator that is returned.

    Attributes:
        num_microbatches: packs of every rank.
        seqlen_sum: real tokens of the group's samples.
        seqlen_squared_sum: sum of the squares of their lengths.
        padded_seqlen_sum: the same of padded lengths.
        padded_seqlen_squared_sum: the same of padded lengths.
        global_loss_tokens: targets that count.
        loss_divisor: sum of their weights.
        consumed_samples: samples of the whole group in the steps so far.
    """

    num_microbatches: int
    seqlen_sum: int
    seqlen_squared_sum: int
    padded_seqlen_sum: int
    padded_seqlen_squared_sum: int
    global_loss_tokens: int
    loss_divisor: float
    consumed_samples: int


def wrap_data_iterator(
    data_iterator: Any,
    config: Any,
    num_microbatches: int,
    pg_collection: Any = None,
    *,
    adapter: ModelAdapter | str = "text",
    settings: SchedulerConfig | None = None,
    fields: Iterable[Field] = (),
    cost: SampleCost | None = None,
    planner: Planner = plan_step,
    callbacks: Iterable[StepCallback] = (),
) -> tuple[Any, int, int, int]:
    """Pack and balance the samples of one global batch over the data-parallel group; every rank calls it once a step.

    Of each model replica one rank reads: the first tensor- and context-parallel rank of the first pipeline stage. The others
    may pass None, and get what their stage needs before this returns: nothing is sent inside the micro-batch loop. The next
    global batch is prepared while this one trains.

    Args:
        data_iterator: yields samples or lists of samples: ours, or Megatron-Core's (`tokens`, `labels`, `loss_mask`,
            `position_ids`, `original_seq_len`, `padded_seq_len`, or `cu_seqlens` of a row that is packed already). With a
            virtual pipeline a list, of which the first that is not None is read. Ranks that do not read pass None; what
            other first tensor-parallel ranks pass is left alone.
        config: Megatron-Core's config, with `calculate_per_token_loss`.
        num_microbatches: `next()` calls that this global batch takes from every reader's iterator.
        pg_collection: groups `dp`, `tp`, `cp`, `pp`; None for those of `parallel_state`.
        adapter: the model family, or its name.
        settings: the scheduler's settings; None takes them from `config` (`max_seqlen_per_dp_cp_rank`). Their
            `samples_per_step` is replaced by `num_microbatches`.
        fields: further fields of the samples.
        cost: cost of a sample; None for a typical model's.
        planner: a function with `plan_step`'s signature, such as `next_fit_planner`.
        callbacks: of the scheduler, such as a `RunLog`: those of the first call, closed when the iterator ends.

    Returns:
        A `RerunDataIterator` over the packs (a list of them for a virtual pipeline), on every rank; the number of packs;
        the sum and the sum of squares of the samples' real lengths, as integers, equal on all ranks. The iterator's `facts`
        has more figures, its `session` (on readers, else None) the scheduler.

    Raises:
        StopIteration: the data has ended, on every rank.
        ValueError: a wrong setting, or an iterator on the wrong rank; the same on every rank.
        EvenpackError: bad input; the same on every rank.
    """
    ranks = Ranks.of(pg_collection)
    link = link_of(ranks, 600.0 if settings is None else settings.timeout)
    iterator, vpp_size = own_iterator(data_iterator), _vpp_size(config, data_iterator)
    scheduling: SchedulerConfig | None = None
    arguments: SessionArguments | None = None
    error: tuple[str, str] | None = None
    try:
        _check_call(iterator, ranks, num_microbatches)
        scheduling = scheduler_config(config, settings, ranks, num_microbatches, vpp_size)
        family = adapter_for(adapter) if isinstance(adapter, str) else adapter
        check_causal(family)
        given = tuple(callbacks)
        check_callbacks(given)
        arguments = SessionArguments(adapter=family, fields=tuple(fields), cost=cost, planner=planner, callbacks=given)
    except (ValueError, EvenpackError) as found:
        error = error_info(found)
    # An error waits until all have come: raising it here would leave the other ranks in their first collective.
    count = num_microbatches if isinstance(num_microbatches, int) else 0
    parts = parts_of(config, ranks.is_first, ranks.is_last)
    calls = link.gather(CallInfo(ranks.where(), ranks.dp.rank(), count, parts, error))
    if not ranks.is_reader:
        return _returned(*_received(link), None, vpp_size)
    try:
        check_calls(calls)
        assert scheduling is not None and arguments is not None
        session = session_of(iterator, ranks)
        step = session.step(scheduling, arguments)
        facts = _facts(step, session)
        if ranks.size == 1:
            # No other rank waits for these packs: each is built when it is asked for, while the device runs the one before.
            return _returned(facts, (selected(fields_of(batch, step), parts) for batch in step), session, vpp_size)
        everything = [fields_of(batch, step) for batch in step]
        payloads = _payloads(facts, everything, [info.fields for info in calls if info.dp_rank == ranks.dp.rank()])
    except Exception as failure:
        text = encode({"error": named(failure)}, [])
        link.deliver([None, *[text] * (ranks.size - 1)])
        raise
    link.deliver(payloads)
    return _returned(facts, [selected(found, parts) for found in everything], session, vpp_size)


def _check_call(iterator: Any, ranks: Ranks, num_microbatches: object) -> None:
    check_int("num_microbatches", num_microbatches, 1)
    if iterator is None and ranks.is_reader:
        raise ValueError("this rank reads for its replica, and has no data iterator")
    if iterator is not None and ranks.tp.rank() > 0:
        raise ValueError("only the first tensor-parallel rank may have a data iterator: its peers would read other samples")


def _vpp_size(config: Any, data_iterator: Any) -> int:
    if isinstance(data_iterator, list):
        return len(data_iterator)
    return getattr(config, "virtual_pipeline_model_parallel_size", None) or 1


def _facts(step: PackedStep, session: IteratorSession) -> StepFacts:
    names = [name for name in StepFacts.__struct_fields__ if name != "consumed_samples"]
    return StepFacts(**{name: getattr(step, name) for name in names}, consumed_samples=session.consumed_samples)


def _payloads(facts: StepFacts, everything: list[dict[str, Any]], parts: list[tuple[str, ...]]) -> list[torch.Tensor | None]:
    """Return the bytes for every rank of the replica, encoded once for each kind of stage; None for the reader itself."""
    encoded: dict[tuple[str, ...], torch.Tensor] = {}
    for one in parts[1:]:
        if one not in encoded:
            encoded[one] = encode(msgspec.to_builtins(facts), [selected(found, one) for found in everything])
    return [None, *(encoded[one] for one in parts[1:])]


def _received(link: ReplicaLink) -> tuple[StepFacts, list[dict[str, Any]]]:
    data = link.deliver(None)
    assert data is not None
    facts, batches = decode(data)
    if "error" in facts:
        raise error_of(*facts["error"])
    return StepFacts(**facts), batches


def _returned(
    facts: StepFacts, batches: Iterable[dict[str, Any]], session: IteratorSession | None, vpp_size: int
) -> tuple[Any, int, int, int]:
    from megatron.core.rerun_state_machine import RerunDataIterator

    iterators: list[Any] = [RerunDataIterator(map(_own, part)) for part in itertools.tee(batches, vpp_size)]
    for one in iterators:
        one.facts, one.session = facts, session
    result = iterators[0] if vpp_size == 1 else iterators
    return result, facts.num_microbatches, facts.seqlen_sum, facts.seqlen_squared_sum


def _own(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a micro-batch for one model chunk: new containers over the same tensors."""
    return {name: copy.copy(value) if isinstance(value, list | dict) else value for name, value in batch.items()}
