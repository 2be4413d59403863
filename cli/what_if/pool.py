"""Samples with their costs: what simulated steps are drawn from."""

from collections.abc import Sequence

import msgspec
import numpy as np

from ...models import adapter_for
from ...scheduler.cost.model import CostModel, typical_cost
from ...scheduler.plan import MediaTowers, PlanConfig, SampleTable
from ...scheduler.plan.settings import NO_TOWERS
from ...scheduler.plan.table import Ints
from ...scheduler.stages.describe import grid_bits, media_towers
from .lengths import Grid, Samples
from .workloads import WORKLOADS

#: Bytes of a token (ids and labels) and of a block's header on the wire.
TOKEN_BYTES, HEADER_BYTES = 16, 256


class CostOf(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample costs, and what the planner must know of the model.

    Attributes:
        name: for people.
        model: integer costs.
        merge: patches along each side that become one token.
        patch_bytes: bytes of a patch's pixels on the wire.
        towers: trained towers, dummy media.
    """

    name: str
    model: CostModel
    merge: int = 2
    patch_bytes: int = 16 * 16 * 3 * 2 * 4
    towers: MediaTowers = NO_TOWERS


def usual_cost(*, vision: bool) -> CostOf:
    """Return the cost of a 7B decoder, `l + l^2 / 65,536`, with Qwen3-VL's tower for samples with images."""
    model = typical_cost(vision=vision)
    if not vision:
        return CostOf(name="a 7B decoder", model=model)
    dummy = model.sample_cost(4, [(1, 4, 4)])
    towers = MediaTowers(dummy_tokens={"image": 4, "video": 4}, dummy_cost={"image": dummy, "video": dummy})
    return CostOf(name="a 7B decoder and Qwen3-VL's tower", model=model, towers=towers)


def cost_of_index(adapter_name: str, *, vision: bool) -> CostOf:
    """Return the cost with which epochs of an index are planned: a typical model, with the towers of the index's family."""
    try:
        adapter = adapter_for(adapter_name)
    except ValueError:  # a family that a training script registers
        return usual_cost(vision=vision)
    usual = usual_cost(vision=bool(adapter.patch_dim))
    patch_bytes = 4 * adapter.patch_dim if adapter.patch_dim else usual.patch_bytes
    return msgspec.structs.replace(usual, patch_bytes=patch_bytes, towers=media_towers(adapter, usual.model))


def cost_of_config(path: str, *, cp_size: int = 1) -> CostOf:
    """Return the cost of a model from its Hugging Face configuration.

    Args:
        path: a config.json, or a folder with one.
        cp_size: context-parallel size.

    Raises:
        ValueError: no configuration, or one without the sizes of a decoder.
    """
    from pathlib import Path

    from transformers import AutoConfig

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"--model {path}: no such file, and no folder with a config.json")
    try:
        config = AutoConfig.from_pretrained(str(file))
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"--model {path}: {str(error).splitlines()[0]}") from None
    name = str(config.model_type)
    try:
        adapter = adapter_for(config)
    except ValueError:
        model, towers = CostModel.from_config(config, cp_size=cp_size), NO_TOWERS
    else:
        model = CostModel.from_config(config, trained_modalities=adapter.trained_modalities, cp_size=cp_size)
        towers = media_towers(adapter, model) if len(model.phases) > 1 else NO_TOWERS
    vision = getattr(getattr(config, "thinker_config", config), "vision_config", None)
    if vision is None:
        return CostOf(name=name, model=model, towers=towers)
    side = int(getattr(vision, "patch_size", 14))
    values = side * side * int(getattr(vision, "in_channels", 3)) * int(getattr(vision, "temporal_patch_size", 2))
    merge = int(getattr(vision, "spatial_merge_size", 2))
    return CostOf(name=name, model=model, merge=merge, patch_bytes=4 * values, towers=towers)


class Pool(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Samples with costs.

    Attributes:
        samples: what was read.
        cost_of: the model.
        row: `[N]`, number of each sample in the source.
        tokens: `[N]` int64.
        cost: `[N, K]` int64.
        nbytes: `[N]` int64, estimated size of a sample on the wire.
        media: `[N]` int64, bit flags.
    """

    samples: Samples
    cost_of: CostOf
    row: Ints
    tokens: Ints
    cost: Ints
    nbytes: Ints
    media: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: Ints) -> "Pool":
        """Return some of the samples."""
        columns = {name: getattr(self, name)[index] for name in ("row", "tokens", "cost", "nbytes", "media")}
        return msgspec.structs.replace(self, **columns)

    def table(self, index: Ints, *, num_ranks: int, align: int) -> SampleTable:
        """Return the table of a step: equal shares, rank by rank, in the order given."""
        return SampleTable.from_lengths(
            self.tokens[index],
            align=align,
            cost=self.cost[index],
            home=np.arange(len(index)) * num_ranks // len(index),
            media=self.media[index],
            nbytes=self.nbytes[index],
        )


def make_pool(samples: Samples, cost_of: CostOf) -> Pool:
    """Cost every sample.

    Raises:
        ValueError: media, for a model without a vision tower.
    """
    grids = _all_grids(samples, cost_of.merge)
    if grids is not None and len(cost_of.model.phases) == 1:
        raise ValueError(f"{samples.source} has media, and {cost_of.name} has no vision tower: name the model with --model")
    patches = np.array([sum(t * h * w for t, h, w in items) for items in grids], np.int64) if grids is not None else 0
    media = np.array([grid_bits(items) for items in grids], np.int64) if grids is not None else np.zeros_like(samples.tokens)
    pool = Pool(
        samples=samples,
        cost_of=cost_of,
        row=np.arange(len(samples.tokens)),
        tokens=samples.tokens,
        cost=cost_of.model.sample_costs(samples.tokens, grids),
        nbytes=samples.tokens * TOKEN_BYTES + HEADER_BYTES + patches * cost_of.patch_bytes,
        media=media,
    )
    return pool.take(np.flatnonzero(pool.tokens))


def _all_grids(samples: Samples, merge: int) -> Sequence[Sequence[Grid]] | None:
    """Return grids; media of which only the tokens are known count as one image of as many patches."""
    if samples.grids is not None:
        return samples.grids
    if samples.vision_tokens is None or not samples.vision_tokens.any():
        return None
    return [[(1, merge, merge * int(count))] if count else [] for count in samples.vision_tokens]


def workload_samples(name: str, count: int, seed: int) -> tuple[Samples, int]:
    """Draw samples of a built-in workload.

    Returns:
        The samples, and the capacity that the workload is meant for.

    Raises:
        ValueError: no such workload.
    """
    known = {key.replace(" ", "-"): key for key in WORKLOADS}
    key = known.get(name.replace(" ", "-"))
    if key is None:
        raise ValueError(f"no workload {name!r}; there are {', '.join(known)}")
    drawn = WORKLOADS[key](np.random.default_rng(seed), 1, count)
    return Samples(source=f"workload {name}", tokens=drawn.table.tokens, grids=drawn.grids), drawn.capacity


class Fitted(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A pool in which every sample fits a pack, and how many did not."""

    pool: Pool
    num_dropped: int = 0
    num_truncated: int = 0

    @property
    def share_above(self) -> float:
        """Share of the samples that are longer than a pack, dropped or cut."""
        return (self.num_dropped + self.num_truncated) / (self.num_dropped + len(self.pool))


def fit_pool(pool: Pool, config: PlanConfig) -> Fitted:
    """Apply the oversize policy of the settings to all samples, before steps are drawn of what is left.

    Raises:
        ValueError: a sample above the capacity under "error"; none is left under "drop"; media to cut under "truncate".
    """
    limit = config.capacity(1)
    above = pool.tokens > limit
    count = int(above.sum())
    if not count:
        return Fitted(pool=pool)
    found = (
        f"{count:,} of {len(pool):,} samples are longer than a pack's {limit:,} tokens "
        f"(the samples have {pool.tokens.min():,} to {pool.tokens.max():,})"
    )
    if config.oversize == "error":
        raise ValueError(f"{found}: training would stop at the first; raise --max-tokens, or pass --oversize drop or truncate")
    if config.oversize == "drop":
        if count == len(pool):
            raise ValueError(f"{found}: none is left to plan; raise --max-tokens")
        return Fitted(pool=pool.take(np.flatnonzero(~above)), num_dropped=count)
    if pool.media[above].any():
        raise ValueError(f"{found}, some with media: what is cut of those is not simulated; pass --oversize drop")
    cost, nbytes = pool.cost.copy(), pool.nbytes.copy()
    cost[above, -1] = pool.cost_of.model.sample_cost(limit)[-1]
    nbytes[above] = limit * TOKEN_BYTES + HEADER_BYTES
    cut = msgspec.structs.replace(pool, tokens=np.minimum(pool.tokens, limit), cost=cost, nbytes=nbytes)
    return Fitted(pool=cut, num_truncated=count)
