"""The built-in workloads of `evenpack plan`, for benchmarks and tests."""

from evenpack.cli.what_if.workloads import WORKLOADS, Workload, image_text, image_text_phases

__all__ = ["WORKLOADS", "Workload", "image_text", "image_text_phases"]
