"""Picture of the simulated step times."""

from pathlib import Path
from typing import Any

PANELS = (("image-text", "step"), ("image-text", "microbatch"), ("long tail", "step"), ("long tail", "microbatch"))


def plot(records: list[dict[str, Any]], path: Path, model: str = "7B") -> Path:
    """Draw step time over its bound against the number of ranks, a panel per workload and sync point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.6), sharey=True)
    for axis, (workload, sync) in zip(axes, PANELS, strict=True):
        chosen = [each for each in records if (each["workload"], each["sync"], each["model"]) == (workload, sync, model)]
        for planner in dict.fromkeys(each["planner"] for each in chosen):
            line = [(each["ranks"], each["over_bound"]) for each in chosen if each["planner"] == planner]
            axis.plot(*zip(*line, strict=True), marker="o", markersize=3, label=planner)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=f'{workload}, sync="{sync}"', xlabel="ranks", xscale="log")
        axis.set_xticks(sorted({each["ranks"] for each in chosen}), minor=False)
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.minorticks_off()
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("step time / lower bound")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path
