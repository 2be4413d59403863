"""The figures of the page; everything here returns plotly figures and draws nothing."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .data import Curve, RunView
from .drawing import step_figure
from .style import ACCENT, BEFORE, COLOURS, layout

Floats = npt.NDArray[np.float64]
#: Longer curves are drawn as means of neighbouring steps.
_MOST_POINTS = 1500
#: Bars of the histogram, equally wide on a logarithmic axis.
_BINS_PER_OCTAVE = 3


class Titled(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, its heading, a sentence below that, and its height in pixels."""

    title: str
    figure: Any
    note: str = ""
    height: int = 320


def run_figures(runs: Sequence[RunView]) -> list[list[Titled]]:
    """Return the figures of each run, in reading order, with the same axes for all runs."""
    edges = length_edges([_floats(run.lengths) for run in runs])
    tops = [_relative(run)[0].max(initial=1) for run in runs if run.load_before is not None]
    lowest = min((float(_floats(curve.values).min()) for run in runs for curve in run.curves if _size(curve)), default=0.0)
    return [_figures(run, edges, max(tops, default=1.0), lowest) for run in runs]


def _figures(run: RunView, edges: Floats, top: float, lowest: float) -> list[Titled]:
    found = []
    if run.load_after is not None:
        found.append(
            Titled(
                title=run.load_title,
                note="Relative to the mean. All ranks wait for the most loaded one.",
                figure=_load_figure(*_relative(run), top),
            )
        )
    if run.drawn is not None:
        figure, note, height = step_figure(run.drawn)
        found.append(Titled(title=run.drawn.title, note=note, figure=figure, height=height))
    shown = [curve for curve in run.curves if _size(curve)]
    if shown:
        found.append(
            Titled(
                title="Efficiency over the steps",
                note="Share of the ranks' time that is work on samples; the rest is waiting or padding.",
                figure=curve_figure(shown, lowest),
                # On a phone every name takes a line.
                height=290 + 20 * len(shown),
            )
        )
    if len(_floats(run.lengths)):
        found.append(
            Titled(
                title="Lengths of the samples",
                note="Share of the samples, and of their tokens, by length.",
                figure=length_figure(_floats(run.lengths), edges),
            )
        )
    return found


def _load_figure(before: Floats, after: Floats, top: float) -> Any:
    """Bars before, dots after, one of each per rank."""
    import plotly.graph_objects as go

    ranks = np.arange(len(after))
    hover = "rank %{x}: %{y:.3f} of the mean<extra>%{fullData.name}</extra>"
    figure = go.Figure(layout=layout(xaxis_title="rank", yaxis_title="load / mean", bargap=0.15))
    if len(before):
        figure.add_trace(
            go.Bar(x=ranks, y=before, name="samples where they were read", marker_color=BEFORE, hovertemplate=hover)
        )
    style = {"mode": "markers", "marker": {"color": ACCENT, "size": 7 if len(after) <= 64 else 4}}
    figure.add_trace(go.Scatter(x=ranks, y=after, name="as planned", hovertemplate=hover, **style))
    figure.update_yaxes(range=[0, max(top, float(after.max(initial=1))) * 1.05])
    figure.update_xaxes(range=[-0.6, len(after) - 0.4], tickformat="d")
    if len(after) <= 16:
        figure.update_xaxes(dtick=1)
    return figure


def curve_figure(curves: Sequence[Curve], lowest: float) -> Any:
    """Lines over the steps."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=layout(xaxis_title="step", yaxis_title="efficiency"))
    for number, curve in enumerate(curves):
        values = _floats(curve.values)
        steps, values = thinned(values, np.arange(len(values)) if curve.steps is None else np.asarray(curve.steps))
        figure.add_trace(
            go.Scatter(
                x=steps,
                y=values,
                name=curve.name,
                mode="lines+markers" if len(steps) <= 40 or _has_lone_points(values) else "lines",
                line_color=COLOURS[number % len(COLOURS)],
                hovertemplate="step %{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_yaxes(tickformat=".0%", range=[max(0.0, np.floor(lowest * 10) / 10 - 0.02), 1.01])
    return figure


def thinned(values: Floats, numbers: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return at most `_MOST_POINTS` places and values: means over equally many step numbers, NaN where none of them is there.

    Args:
        values: `[S]`.
        numbers: `[S]`, number of each step, ascending.

    Example:
        >>> [part.tolist() for part in thinned(np.array([1.0, 3.0, 2.0]), np.array([5, 6, 8]))]
        [[5.0, 6.0, 7.0, 8.0], [1.0, 3.0, nan, 2.0]]
    """
    span = int(numbers[-1] - numbers[0]) + 1
    width = -(-span // _MOST_POINTS)
    block = (numbers - numbers[0]) // width
    counts = np.bincount(block).astype(np.float64)
    middle = numbers[0] + np.arange(len(counts)) * width + (width - 1) / 2
    there = np.maximum(counts, 1)
    steps = np.where(counts > 0, np.bincount(block, numbers) / there, middle)
    return steps, np.where(counts > 0, np.bincount(block, values) / there, np.nan)


def _has_lone_points(values: Floats) -> bool:
    """Whether a value has no neighbour, so that no line would show it."""
    there = np.pad(~np.isnan(values), 1)
    return bool((there[1:-1] & ~there[:-2] & ~there[2:]).any())


def length_edges(lengths: Sequence[Floats]) -> Floats:
    """Return edges that hold all lengths, `_BINS_PER_OCTAVE` bins for each doubling."""
    together = np.concatenate([np.empty(0), *lengths])
    if not len(together):
        return np.array([1.0, 2.0])
    low = np.floor(np.log2(max(together.min(), 1)) * _BINS_PER_OCTAVE)
    high = np.floor(np.log2(max(together.max(), 1)) * _BINS_PER_OCTAVE) + 1
    edges: Floats = 2 ** (np.arange(low, high + 1) / _BINS_PER_OCTAVE)
    return edges


def length_figure(lengths: Floats, edges: Floats) -> Any:
    """Histogram of the lengths, by samples and by tokens."""
    import plotly.graph_objects as go

    place = np.clip(np.searchsorted(edges, lengths, "right") - 1, 0, len(edges) - 2)
    samples = np.bincount(place, minlength=len(edges) - 1) / len(lengths)
    tokens = np.bincount(place, lengths, minlength=len(edges) - 1) / max(float(lengths.sum()), 1.0)
    middle = np.sqrt(edges[:-1] * edges[1:])
    span = [f"{np.ceil(low):,.0f} to {np.ceil(high) - 1:,.0f} tokens" for low, high in pairwise(edges)]
    figure = go.Figure(layout=layout(xaxis_title="tokens of a sample", yaxis_title="share", bargap=0.08))
    hover = "%{customdata}: %{y:.2%}<extra>%{fullData.name}</extra>"
    width = np.diff(edges)
    figure.add_trace(
        go.Bar(
            x=middle,
            y=samples,
            width=width * 0.92,
            customdata=span,
            name="of samples",
            marker_color=ACCENT,
            hovertemplate=hover,
        )
    )
    style = {"mode": "lines+markers", "line": {"color": COLOURS[1]}}
    figure.add_trace(go.Scatter(x=middle, y=tokens, customdata=span, name="of tokens", hovertemplate=hover, **style))
    ticks = 2.0 ** np.arange(np.floor(np.log2(edges[0])), np.ceil(np.log2(edges[-1])) + 1)
    ticks = ticks[:: max(1, -(-len(ticks) // 7))]
    labels = [f"{tick / 1024:g}K" if tick >= 1024 else f"{tick:g}" for tick in ticks]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=labels)
    figure.update_yaxes(tickformat=".0%")
    return figure


def _relative(run: RunView) -> tuple[Floats, Floats]:
    """Loads over the mean of the planned ones: both hold the same work."""
    before = _floats(run.load_before if run.load_before is not None else ())
    after = _floats(run.load_after if run.load_after is not None else ())
    mean = max(float(after.mean()) if len(after) else 0.0, 1e-12)
    return before / mean, after / mean


def _floats(values: npt.ArrayLike) -> Floats:
    return np.asarray(values, np.float64)


def _size(curve: Curve) -> int:
    return len(_floats(curve.values))
