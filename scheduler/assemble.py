"""Put the parts of a scheduler together, after the ranks have agreed that theirs are the same."""

from collections.abc import Sequence

import msgspec
import torch

from .. import __version__  # pyright: ignore[reportMissingImports]
from ..models import ModelAdapter
from .comm.agreement import agree
from .comm.channel import Channel
from .comm.groups import ProcessGroups
from .config import SchedulerConfig
from .pipeline import Planner, Preparer
from .plan import CODE_VERSION, MediaTowers
from .relay import Relay
from .sources import Source
from .stages.blocks import WIRE_VERSION
from .stages.collect import Reader
from .stages.describe import Describer
from .stages.gather import Gatherer, digest_of
from .step import StepContext


def assemble(
    source: Source,
    *,
    adapter: ModelAdapter,
    config: SchedulerConfig,
    towers: MediaTowers,
    groups: ProcessGroups,
    channel: Channel,
    describer: Describer,
    phases: Sequence[str],
    planner: Planner,
    relay: Relay | None,
    count_items: bool,
) -> Preparer:
    """Return what makes the steps; collective.

    Args:
        source: this rank's samples.
        adapter: the model family, with the user's fields.
        config: settings.
        towers: the adapter's media towers.
        groups: process groups.
        channel: connection to the peers.
        describer: describes samples.
        phases: names of the cost's phases.
        planner: a function with `plan_step`'s signature.
        relay: takes operations that belong on the training thread, None where there are none.
        count_items: `samples_per_step` counts items of the source.

    Raises:
        FieldMismatchError: ranks with different settings, fields or versions; raised on every rank.
    """
    terms = {
        "version": __version__,
        "wire_version": WIRE_VERSION,
        "planner": CODE_VERSION,
        "adapter": adapter.name,
        "phases": phases,
        "fields": {field.name: msgspec.to_builtins(field) for field in adapter.fields},
        "count_items": count_items,
        "towers": msgspec.to_builtins(towers),
        **{key: value for key, value in msgspec.to_builtins(config).items() if key not in ("timeout", "prefetch")},
    }
    if channel.gathers_on_device:
        terms["prefetch"] = config.prefetch  # the order of the training thread's collectives follows from it
    format_digest = digest_of(agree(channel.steps, terms))
    context = StepContext(
        adapter=adapter,
        config=config,
        towers=towers,
        rank=groups.rank,
        cp_size=groups.cp_size,
        num_replicas=groups.num_replicas,
        channel=channel,
        pin=torch.cuda.is_available(),
        is_writer=bool(groups.is_writer),
        planner=f"{getattr(planner, '__module__', '')}.{getattr(planner, '__qualname__', type(planner).__qualname__)}",
        phases=tuple(phases),
    )
    return Preparer(
        reader=Reader(source, describer, count_items=count_items),
        describer=describer,
        channel=channel,
        gatherer=Gatherer(channel.steps, format_digest=format_digest, slots=config.samples_per_step or 64),
        planner=planner,
        context=context,
        relay=relay,
    )
