"""The built-in workloads of `evenpack plan`, for benchmarks and tests."""

from evenpack.cli.what_if.workloads import WORKLOADS, Rng, Workload, image_text

__all__ = ["WORKLOADS", "Workload", "image_text", "image_text_phases"]


def image_text_phases(rng: Rng, num_ranks: int, per_rank: int) -> Workload:
    """`image_text` with one cost for the tower and one for the decoder."""
    return image_text(rng, num_ranks, per_rank, phases=2)
