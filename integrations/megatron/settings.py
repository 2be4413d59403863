"""The scheduler's settings, from Megatron-Core's config."""

import math
from typing import Any

import msgspec

from ...collate.packs.alignment import Alignment, Fp8Recipe, pack_alignment
from ...scheduler import SchedulerConfig
from .ranks import Ranks

#: Recipes of Megatron-Core's config under our names; the block of a custom one is not known.
_RECIPES: dict[str, Fp8Recipe] = {
    "delayed": "tensorwise",
    "tensorwise": "tensorwise",
    "mxfp8": "mxfp8",
    "blockwise": "blockwise",
    "nvfp4": "nvfp4",
}


def scheduler_config(config: Any, settings: SchedulerConfig | None, ranks: Ranks, count: int, vpp_size: int) -> SchedulerConfig:
    """Return the settings of a scheduler whose steps take `count` items of the source.

    Args:
        config: Megatron-Core's `TransformerConfig` or `ModelParallelConfig`.
        settings: the user's own; None takes them from `config`.
        ranks: this rank's groups.
        count: `next()` calls per step.
        vpp_size: model chunks of a pipeline rank.

    Raises:
        ValueError: settings that do not train right with packs of uneven lengths.

    Example:
        `max_seqlen_per_dp_cp_rank=4096`, context parallelism of 2, tensor parallelism of 4 with sequence parallelism: packs
        of up to 8192 padded tokens, every segment padded to a multiple of 16. With `fp8` and `fp8_recipe="blockwise"` the
        pack, not each segment, is padded to a multiple of 1024.
    """
    _check(config, settings, ranks)
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or 1
    multiple = group if vpp_size > 1 else 1
    align, pack_align = _alignment(config, ranks, settings)
    if settings is None:
        return SchedulerConfig(
            max_tokens=config.max_seqlen_per_dp_cp_rank,
            samples_per_step=count,
            sync="microbatch" if (getattr(config, "expert_model_parallel_size", 1) or 1) > 1 else "step",
            microbatch_multiple=multiple,
            pipeline_stages=ranks.pp.size(),
            align=align,
            pack_align=_static_rows(config, pack_align) or pack_align,
            max_segments=getattr(config, "thd_max_packed_sequences", None),
        )
    if settings.microbatch_multiple % multiple:
        raise ValueError(
            f"microbatch_multiple={settings.microbatch_multiple} must be a multiple of "
            f"microbatch_group_size_per_vp_stage={multiple} with a virtual pipeline"
        )
    given = settings.align or align
    if given % align:
        raise ValueError(f"align={given} must be a multiple of {align} under these tensor and context parallel sizes")
    rows = settings.pack_align or math.lcm(pack_align, given)
    if rows % pack_align:
        raise ValueError(f"pack_align={rows} must be a multiple of {pack_align} under these parallel sizes and this FP8 recipe")
    return msgspec.structs.replace(settings, samples_per_step=count, align=given, pack_align=rows)


def _check(config: Any, settings: SchedulerConfig | None, ranks: Ranks) -> None:
    if not _uses(config, "calculate_per_token_loss"):
        raise ValueError(
            "calculate_per_token_loss must be on: packs hold different numbers of targets, and the mean of their means is "
            "not the mean over tokens"
        )
    if ranks.pp.size() > 1 and not _uses(config, "variable_seq_lengths"):
        raise ValueError("variable_seq_lengths must be on with pipeline parallelism: packs differ in length")
    if settings is None:
        longest = getattr(config, "max_seqlen_per_dp_cp_rank", None)
        if not isinstance(longest, int) or longest < 1:
            raise ValueError(f"config.max_seqlen_per_dp_cp_rank must be a positive number of tokens, got {longest!r}")
        return
    if settings.tokens_per_step is not None or settings.scope == "microbatch" or settings.on_exhausted != "drain":
        raise ValueError(
            "num_microbatches says what a step takes from the data iterator: settings must leave tokens_per_step, "
            "scope='microbatch' and on_exhausted='stop' alone"
        )


def _uses(config: Any, name: str) -> bool:
    return bool(getattr(config, name, False))


def _alignment(config: Any, ranks: Ranks, settings: SchedulerConfig | None) -> Alignment:
    """Return what segments and rows must be multiples of, under the parallel sizes and the FP8 recipe of the config."""
    recipe: Fp8Recipe | None = None
    for kind in ("fp8", "fp4"):
        if _uses(config, kind):
            named = getattr(config, f"{kind}_recipe", None)
            named = getattr(named, "value", named)
            recipe = _RECIPES.get(str(named))
            if recipe is None and (settings is None or settings.pack_align is None):
                raise ValueError(
                    f"{kind}_recipe={named!r}: how many tokens it takes a multiple of is unknown, pass settings with pack_align"
                )
    return pack_alignment(
        cp_size=ranks.cp_size,
        tp_size=ranks.tp.size(),
        sequence_parallel=_uses(config, "sequence_parallel"),
        fp8=recipe,
    )


def _static_rows(config: Any, pack_align: int) -> int | None:
    """Return the multiple that rows are padded to, where the config (of the development branch) names one."""
    found = getattr(config, "pad_packed_seq_alignment", None)
    if found is None:
        return None
    if not isinstance(found, int) or found % pack_align:
        raise ValueError(f"pad_packed_seq_alignment must be a multiple of {pack_align}, got {found!r}: pass settings instead")
    return found
