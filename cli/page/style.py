"""Colours and layout that all figures share."""

from typing import Any

#: The planned run, and what came before it.
ACCENT, BEFORE = "#2563a6", "#f0b37e"
#: Lines, in order: told apart by colour-blind readers too.
COLOURS = ("#2563a6", "#d9722e", "#2b9a7a", "#a35fb0", "#8a8f98", "#b8a01f")
INK, GRID = "#1f2933", "#e3e8ed"


def layout(**settings: Any) -> dict[str, Any]:
    """Return a plotly layout that fits any width: legend below the plot, no title, small margins."""
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True, "fixedrange": True}
    return {
        "template": "none",
        "autosize": True,
        "margin": {"l": 48, "r": 12, "t": 8, "b": 40},
        "font": {"size": 12, "color": INK, "family": "system-ui, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": axis,
        "yaxis": dict(axis),
        **settings,
    }
