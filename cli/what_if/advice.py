"""Other settings, simulated: what each would gain."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ...core.errors import InfeasiblePlanError
from .pool import Fitted, Pool, fit_pool
from .simulate import METHODS, OURS, Setting, simulate

#: Settings that gain less are not worth a change.
WORTH = 0.01
#: Samples that are planned to try a setting, and the fewest steps; half as many where a step has twice the samples.
SAMPLES_TRIED, FEWEST_STEPS = 16_384, 4


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A changed setting.

    Attributes:
        change: the setting, as one would write it.
        meaning: what it takes to change it.
        cost: mean cost of a step per unit of work that it does, relative to the setting as it is: 0.9 is 10% less.
        num_microbatches: mean packs of a rank.
        moved_share: mean share of the bytes that cross ranks.
    """

    change: str
    meaning: str
    cost: float
    num_microbatches: float
    moved_share: float

    @property
    def gain(self) -> float:
        """Time saved per unit of work, as a share."""
        return 1 - self.cost


def alternatives(pool: Pool, fitted: Fitted, setting: Setting, cp_size: int = 1) -> list[tuple[str, str, Pool, Setting]]:
    """Return the changes that can be made: (change, meaning, samples, setting).

    Left out are those that would drop or cut more samples than the setting does, and those for which there are too few.
    """
    setting = msgspec.structs.replace(setting, steps=min(setting.steps, max(FEWEST_STEPS, SAMPLES_TRIED // setting.batch)))
    config = setting.config
    lost = fitted.num_dropped + fitted.num_truncated
    found = []
    for factor, words in ((2.0, "more memory on every GPU"), (0.5, "less memory on every GPU, more micro-batches")):
        tokens = int(config.max_tokens * factor)
        changed = msgspec.structs.replace(config, max_tokens=tokens)
        if tokens < (config.align or 1) or (factor < 1 and int(pool.tokens.max()) > tokens):
            continue
        other = fit_pool(pool, changed)
        if factor > 1 and other.num_dropped + other.num_truncated < lost:
            words += f", and {lost - other.num_dropped - other.num_truncated:,} samples fit that do not now"
        found.append((f"--max-tokens {tokens // cp_size}", words, other.pool, msgspec.structs.replace(setting, config=changed)))
    sync, words = (
        ("microbatch", "ranks wait in every micro-batch, as FSDP does")
        if config.sync == "step"
        else ("step", "ranks wait once a step, as DDP and ZeRO-1 do, not FSDP")
    )
    changed = msgspec.structs.replace(config, sync=sync)
    found.append((f"--sync {sync}", words, fitted.pool, msgspec.structs.replace(setting, config=changed)))
    for factor, words in ((2.0, "a batch twice as large per optimizer step"), (0.5, "a batch half as large")):
        samples = int(setting.samples_per_step * factor)
        steps = max(1, setting.steps // 2) if factor > 1 else setting.steps
        changed_setting = msgspec.structs.replace(setting, samples_per_step=samples, steps=steps)
        if samples >= 1 and changed_setting.batch <= len(fitted.pool):
            found.append((f"--samples-per-step {samples}", words, fitted.pool, changed_setting))
    if config.movement == "minimal" and config.tolerance > 0:
        changed = msgspec.structs.replace(config, movement="free")
        words = "samples go anywhere: the best balance, at many times the bytes"
        found.append(("--movement free", words, fitted.pool, msgspec.structs.replace(setting, config=changed)))
    return found


def advise(
    tried: Sequence[tuple[str, str, Pool, Setting]],
    now: Sequence[float],
    *,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Alternative]:
    """Simulate changes, and return them with the one that gains most first.

    Args:
        tried: what `alternatives` returned.
        now: efficiency of each step of the setting as it is; as many of them as are tried, the same samples, are compared.
        progress: called after each plan, with 1.
    """
    ours = {OURS: METHODS[OURS]}
    base = float(np.mean(now[: max((changed.steps for _, _, _, changed in tried), default=1)]))
    found = []
    for change, meaning, samples, changed in tried:
        try:
            figures = simulate(samples, changed, methods=ours, progress=progress).figures[OURS]
        except InfeasiblePlanError:
            continue  # it cannot be planned: nothing to propose
        found.append(
            Alternative(
                change=change,
                meaning=meaning,
                cost=base / figures.mean_efficiency,
                num_microbatches=figures.num_microbatches,
                moved_share=figures.moved_share,
            )
        )
    return sorted(found, key=lambda one: one.cost)
