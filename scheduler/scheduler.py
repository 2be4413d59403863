"""`PackingScheduler`: wraps a training loop's data source."""

import time
import warnings
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from .. import __version__
from ..core import Field
from ..models import ModelAdapter
from ..models.cost import CostCoefficients
from .blocks import WIRE_VERSION
from .collect import Reader
from .config import SchedulerConfig
from .cost import CostModel
from .describe import Describer, SampleCost, dummy_settings
from .gather import Gatherer, digest_of
from .groups import ProcessGroups
from .handshake import agree
from .plan import CODE_VERSION, plan_step, warm_up
from .prefetch import Prefetcher
from .prepare import Planner, Preparer
from .stats import StepStats
from .step import PackedStep, StepContext

#: Decoder and vision work of a 7-billion-parameter model, relative: see `models.cost` for a model's own.
_TYPICAL = CostCoefficients(decoder_linear=1.0, decoder_quadratic=1.0 / 65536)
_TYPICAL_VISION = msgspec.structs.replace(_TYPICAL, vision_linear=0.0625, vision_quadratic=9.5e-6, has_vision=True)


class PackingScheduler(Iterator[PackedStep]):
    """Yields one `PackedStep` per optimizer step, balanced over the ranks of a data-parallel group.

    Every rank builds one, with its own source, and takes the same number of steps. While a step trains, the next one is
    collected, planned and exchanged by a worker thread. Iterating to the end ends an epoch; iterating again begins the next.
    A loop that broke off goes on where it stopped.

    Args:
        source: iterable of samples, or of lists of samples (a loader, a dataset): see `collate.prepare_sample`.
        config: settings, equal on all ranks.
        adapter: the model family.
        groups: process groups; default: every rank of the job.
        cost: cost of a sample; default: that of a typical model of 7 billion parameters.
        fields: further fields of the samples.
        planner: a function with `plan_step`'s signature.

    Raises:
        ValueError: a setting of the wrong type or range.
        FieldMismatchError: ranks with different settings, fields or versions; raised on every rank.

    Example:
        >>> from evenpack.models import adapter_for
        >>> source = [{"input_ids": [1] * length, "sample_id": length} for length in (5, 3, 2, 6)]
        >>> config = SchedulerConfig(max_tokens=8, samples_per_step=4)
        >>> with PackingScheduler(source, config=config, adapter=adapter_for("text")) as scheduler:
        ...     [[batch.sample_ids for batch in step] for step in scheduler]
        [[[5, 3], [2, 6]]]
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        config: SchedulerConfig,
        adapter: ModelAdapter,
        groups: ProcessGroups | None = None,
        cost: SampleCost | None = None,
        fields: Iterable[Field] = (),
        planner: Planner = plan_step,
    ) -> None:
        adapter = msgspec.structs.replace(adapter, fields=adapter.fields.extended(fields))
        groups = groups or ProcessGroups.from_world()
        cost = cost or default_cost(adapter)
        config = config.resolved(**dummy_settings(adapter, cost))
        warm_up()
        self._source = source
        self._config = config
        self._num_ranks = groups.num_ranks
        self._channel = groups.open_channel(config)
        self._stats: StepStats | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._in_epoch = False
        try:
            self._preparer = self._build(adapter, groups, cost, planner)
        except BaseException:
            self._channel.close()
            raise
        self._prefetcher: Prefetcher[PackedStep | None] | None = None

    def _build(self, adapter: ModelAdapter, groups: ProcessGroups, cost: SampleCost, planner: Planner) -> Preparer:
        config, channel = self._config, self._channel
        terms = {
            "version": __version__,
            "wire_version": WIRE_VERSION,
            "planner": CODE_VERSION,
            "adapter": adapter.name,
            "phases": cost.phases,
            "fields": {field.name: msgspec.to_builtins(field) for field in adapter.fields},
            **{key: value for key, value in msgspec.to_builtins(config).items() if key not in ("timeout", "prefetch")},
        }
        format_digest = digest_of(agree(channel.steps, terms))
        describer = Describer(adapter=adapter, cost=cost, config=config, cp_size=groups.cp_size, rank=groups.rank)
        context = StepContext(
            adapter=adapter,
            config=config,
            rank=groups.rank,
            cp_size=groups.cp_size,
            num_replicas=groups.num_replicas,
            control=channel.control,
            pin=torch.cuda.is_available(),
        )
        return Preparer(
            reader=Reader(self._source, describer),
            describer=describer,
            channel=channel,
            gatherer=Gatherer(channel.steps, format_digest=format_digest, slots=config.samples_per_step or 64),
            planner=planner,
            context=context,
        )

    @property
    def stats(self) -> StepStats | None:
        """Figures of the last step that was handed out, None before the first."""
        return self._stats

    @property
    def config(self) -> SchedulerConfig:
        """The settings, with what the adapter filled in."""
        return self._config

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedStep:
        if self._closed:
            raise RuntimeError("the scheduler is closed")
        if self._failure is not None:
            raise self._failure
        if not self._in_epoch:
            self._begin_epoch()
        assert self._prefetcher is not None
        try:
            step = self._prefetcher.get()
        except Exception as error:
            self._failure = error
            raise
        if step is None:
            self._end_epoch()
            raise StopIteration
        self._stats = step.stats
        return step

    def __len__(self) -> int:
        """Number of steps of an epoch, if every rank's source is as long as this one's; no collective.

        Raises:
            TypeError: the source has no length, or steps are not counted in samples.
        """
        per_step = self._config.samples_per_step
        if per_step is None:
            raise TypeError("steps that are not counted in samples per rank have no length known beforehand")
        samples = source_length(self._source)
        return -(-samples // per_step) if self._config.on_exhausted == "drain" else samples // per_step

    def close(self) -> None:
        """Stop preparing steps, end the threads and leave the group; may be called at any time, and again."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        self._end_epoch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _begin_epoch(self) -> None:
        self._preparer.start_epoch()
        self._prefetcher = Prefetcher(self._preparer, depth=self._config.prefetch, name="evenpack-prefetch")
        self._in_epoch = True

    def _end_epoch(self) -> None:
        self._in_epoch = False
        if self._prefetcher is None:
            return
        started = time.monotonic()
        if not self._prefetcher.close(min(5.0, self._config.timeout)):
            warnings.warn(
                f"the source did not return within {time.monotonic() - started:.0f} s: its thread is left behind",
                RuntimeWarning,
                stacklevel=2,
            )
        self._prefetcher = None


def default_cost(adapter: ModelAdapter) -> CostModel:
    """Return the cost model of a typical model of 7 billion parameters, with a vision tower where the family has one."""
    return CostModel.from_coefficients(_TYPICAL_VISION if adapter.patch_dim else _TYPICAL)


def source_length(source: Any) -> int:
    """Return the number of samples of a source.

    Raises:
        TypeError: the source has no length.
    """
    if isinstance(source, torch.utils.data.DataLoader) and source.batch_size is not None:
        total = len(source.sampler)  # type: ignore[arg-type]
        return total // source.batch_size * source.batch_size if source.drop_last else total
    return len(source)
