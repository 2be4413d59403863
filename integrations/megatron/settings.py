"""The scheduler's settings, from Megatron-Core's config."""

from typing import Any

import msgspec

from ...scheduler import SchedulerConfig
from .ranks import Ranks


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
        of up to 8192 padded tokens, every segment padded to a multiple of 16.
    """
    _check(config, settings, ranks)
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or 1
    multiple = group if vpp_size > 1 else 1
    align = (2 * ranks.cp_size if ranks.cp_size > 1 else 1) * (ranks.tp.size() if _uses(config, "sequence_parallel") else 1)
    if settings is None:
        stages = ranks.pp.size()
        return SchedulerConfig(
            max_tokens=config.max_seqlen_per_dp_cp_rank,
            samples_per_step=count,
            sync="microbatch" if (getattr(config, "expert_model_parallel_size", 1) or 1) > 1 else "step",
            microbatch_multiple=multiple,
            pipeline_stages=stages,
            order="small_ends" if stages > 1 else "heaviest_first",
            align=align,
            pack_align=_pack_align(config, align),
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
    return msgspec.structs.replace(settings, samples_per_step=count, align=given)


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


def _pack_align(config: Any, align: int) -> int | None:
    """Return the multiple that rows are padded to, where the config (of the development branch) names one."""
    found = getattr(config, "pad_packed_seq_alignment", None)
    if found is None:
        return None
    if not isinstance(found, int) or found % align:
        raise ValueError(f"pad_packed_seq_alignment must be a multiple of {align}, got {found!r}: pass settings instead")
    return found
