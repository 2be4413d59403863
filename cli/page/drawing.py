"""A step, drawn: one row per rank, its packs one after the other, a bar per segment."""

import html
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .data import DrawnStep
from .style import layout

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Ranks that are drawn; of more, the most and the least loaded and some between.
_MOST_RANKS = 16
#: Segments that a browser draws quickly; with more, fewer ranks are drawn.
_MOST_SEGMENTS = 6000
#: Shades of neighbouring packs, of segments that stayed where they were read and of those that moved.
STAYED, MOVED = ("#2563a6", "#6fa3d8"), ("#d9722e", "#f0b37e")


class Segments(msgspec.Struct, frozen=True, kw_only=True):
    """Where the segments of the drawn ranks lie; one entry per segment, in pack order.

    `time` and `tokens` are `[S, 2]`: start and width, in shares of the mean load of a rank, and in padded tokens with every
    pack starting at a multiple of the capacity.
    """

    sample: Ints
    rank: Ints
    microbatch: Ints
    place: Ints
    time: Floats
    tokens: Floats


def step_figure(drawn: DrawnStep) -> tuple[Any, str, int]:
    """Return the figure of a step, a sentence about it, and its height in pixels."""
    import plotly.graph_objects as go

    ranks = drawn_ranks(drawn)
    found = segments(drawn, ranks)
    moved = drawn.table.home[found.sample] != found.rank
    row = np.searchsorted(ranks, found.rank)
    texts = _hover_texts(drawn, found)
    by_pack = _order_of(found)
    figure = go.Figure(layout=layout(barmode="overlay", bargap=0.18, yaxis_title="rank", dragmode=False))
    for name, chosen, shades in (("stays on its rank", ~moved, STAYED), ("moved here", moved, MOVED)):
        index = by_pack[chosen[by_pack]]
        figure.add_trace(
            go.Bar(
                orientation="h",
                name=name,
                y=row[index],
                base=found.time[index, 0].round(6),
                x=found.time[index, 1].round(6),
                marker={
                    "color": [shades[m % 2] for m in found.microbatch[index]],
                    "line": {"color": "#fff", "width": 0.5},
                },
                customdata=[texts[k] for k in index],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    height = 140 + 22 * len(ranks)
    figure.update_yaxes(tickvals=np.arange(len(ranks)), ticktext=[str(rank) for rank in ranks], autorange="reversed")
    figure.update_xaxes(title="time, in mean loads of a rank", rangemode="tozero", showgrid=False)
    # The legend goes to the bottom: on a phone the buttons take the top.
    legend = {"yref": "container", "y": 0, "yanchor": "bottom"}
    figure.update_layout(shapes=_lines(drawn, "time"), updatemenus=[_views(drawn, found, moved)], legend=legend)
    return figure, _note(drawn, ranks), height


def drawn_ranks(drawn: DrawnStep) -> Ints:
    """Return the ranks to draw, ascending: all of few; else the most and the least loaded and some between."""
    plan = drawn.plan
    share = max(1, len(drawn.table) // plan.num_ranks)
    most = max(2, min(_MOST_RANKS, _MOST_SEGMENTS // share))
    if plan.num_ranks <= most:
        return np.arange(plan.num_ranks)
    by_load = np.argsort(-plan.cost.sum(axis=(1, 2)), kind="stable")
    return np.sort(by_load[np.unique(np.linspace(0, plan.num_ranks - 1, most).astype(int))])


def segments(drawn: DrawnStep, ranks: Ints) -> Segments:
    """Lay out the segments of some ranks."""
    plan, table = drawn.plan, drawn.table
    weight = table.cost.reshape(len(table), -1).sum(axis=1)
    mean = max(float(plan.cost.sum()) / plan.num_ranks, 1e-12)
    starts = pack_starts(drawn)
    capacity = _capacity(drawn)
    columns: list[list[npt.NDArray[Any]]] = []
    for rank in ranks:
        for m in range(plan.num_microbatches):
            ids = plan.ids(int(rank), m)
            time = np.cumsum(weight[ids]) - weight[ids] + starts[rank, m]
            tokens = np.cumsum(table.padded[ids]) - table.padded[ids] + m * capacity
            columns.append(
                [
                    ids,
                    np.full(len(ids), rank),
                    np.full(len(ids), m),
                    np.arange(len(ids)),
                    np.stack([time / mean, weight[ids] / mean], axis=1),
                    np.stack([tokens, table.padded[ids]], axis=1).astype(np.float64),
                ]
            )
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    return Segments(**dict(zip(Segments.__struct_fields__, joined, strict=True)))


def _order_of(found: Segments) -> Ints:
    """Return the order in which segments are drawn: dark shades first, since the legend takes the first colour."""
    return np.argsort(found.microbatch % 2, kind="stable")


def pack_starts(drawn: DrawnStep) -> Ints:
    """Return `[R, M]`, the cost before each pack begins: of the rank's own packs, or of the slowest rank's at each sync."""
    cost = drawn.plan.cost
    if drawn.config.sync == "step":
        own = cost.sum(axis=2)
        return np.asarray(np.cumsum(own, axis=1) - own, np.int64)
    slowest = cost.max(axis=0).sum(axis=1)
    return np.asarray(np.broadcast_to(np.cumsum(slowest) - slowest, cost.shape[:2]), np.int64)


def _hover_texts(drawn: DrawnStep, found: Segments) -> list[str]:
    """Return what is shown of each segment."""
    table, plan = drawn.table, drawn.plan
    weight = table.cost.reshape(len(table), -1).sum(axis=1)
    counts = np.bincount(found.rank * plan.num_microbatches + found.microbatch, minlength=plan.is_dummy.size)
    texts = []
    for k, sample in enumerate(found.sample):
        rank, m = int(found.rank[k]), int(found.microbatch[k])
        name = html.escape(str(drawn.ids[sample] if drawn.ids is not None else int(sample)))
        home = int(table.home[sample])
        texts.append(
            f"<b>sample {name}</b><br>{table.tokens[sample]:,} tokens"
            f"<br>cost {weight[sample]:,} ({found.time[k, 1]:.2%} of a rank's mean)"
            f"<br>{'read here' if home == rank else f'read by rank {home}'}"
            f"<br>rank {rank}, micro-batch {m}, segment {found.place[k] + 1} of {counts[rank * plan.num_microbatches + m]}"
        )
    return texts


def _capacity(drawn: DrawnStep) -> int:
    """Width of a pack's place: its capacity, or more where a plan does not respect it."""
    return max(drawn.config.max_tokens * drawn.cp_size, int(drawn.plan.padded.max(initial=0)))


def _views(drawn: DrawnStep, found: Segments, moved: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return the buttons that change from time to tokens and back."""

    by_pack = _order_of(found)

    def button(label: str, kind: str, where: Floats, title: str) -> dict[str, Any]:
        parts = [where[by_pack[chosen[by_pack]]].round(6) for chosen in (~moved, moved)]
        data = {"base": [part[:, 0].tolist() for part in parts], "x": [part[:, 1].tolist() for part in parts]}
        return {
            "label": label,
            "method": "update",
            "args": [data, {"xaxis.title.text": title, "shapes": _lines(drawn, kind), "xaxis.autorange": True}],
        }

    return {
        "type": "buttons",
        "direction": "right",
        "x": 1,
        "xanchor": "right",
        "y": 1.02,
        "yanchor": "bottom",
        "pad": {"t": 0, "b": 2, "r": 0},
        "buttons": [
            button("time", "time", found.time, "time, in mean loads of a rank"),
            button("tokens", "tokens", found.tokens, "padded tokens"),
        ],
    }


def _lines(drawn: DrawnStep, kind: str) -> list[dict[str, Any]]:
    """Return vertical lines: the syncs, and the mean load; or the ends of the packs' room."""
    plan = drawn.plan
    if kind == "tokens":
        at = [(m + 1) * float(_capacity(drawn)) for m in range(plan.num_microbatches)]
    else:
        mean = max(float(plan.cost.sum()) / plan.num_ranks, 1e-12)
        ends = plan.cost.max(axis=0).sum(axis=1).cumsum() / mean if drawn.config.sync == "microbatch" else []
        at = [1.0, *ends] if drawn.config.sync == "step" else list(ends)
    style = {"color": "#1f2933", "width": 1, "dash": "dot"}
    return [{"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": style} for x in at]


def _note(drawn: DrawnStep, ranks: Ints) -> str:
    plan = drawn.plan
    which = (
        "Every rank"
        if len(ranks) == plan.num_ranks
        else f"{len(ranks)} of {plan.num_ranks} ranks, from the most to the least loaded,"
    )
    line = "the mean load" if drawn.config.sync == "step" else "where all ranks wait for the slowest"
    return (
        f"{which} with {plan.num_microbatches} pack{'s' if plan.num_microbatches > 1 else ''} in alternating shades; "
        f"a bar is a sample, hover or tap for it. "
        f"Dotted: {line}; by tokens, the end of each pack's room."
    )
