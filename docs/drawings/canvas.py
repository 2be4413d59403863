"""A drawing as a list of plain shapes, and its rendering as an SVG that is the same bytes every time."""

import io
from typing import Any, Literal

#: Width of every drawing in points. On a phone of 360 pixels a letter of 12 points is 10 pixels high.
WIDTH = 432.0
SMALL, NORMAL = 10.5, 12.0
INK, FAINT, WAIT = "#222222", "#8a8a8a", "#e4e4e4"
#: Colours of the ranks that samples come from, told apart by people with any kind of colour vision (Okabe and Ito).
RANKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")


class Canvas:
    """A page of `WIDTH` x `height` points, y downwards.

    Args:
        title: what is seen, for readers who cannot see it.
        height: in points.
    """

    def __init__(self, title: str, height: float) -> None:
        from matplotlib.figure import Figure

        self.title, self.height = title, height
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "white", hatch: str = "") -> None:
        """Draw a rectangle from its upper left corner."""
        from matplotlib.patches import Rectangle

        style: dict[str, Any] = dict(facecolor=fill, edgecolor=edge, linewidth=0.8)
        if hatch:
            style |= dict(hatch=hatch, edgecolor=FAINT, linewidth=0.0)
        self.axes.add_patch(Rectangle((x, y), width, height, **style))

    def text(
        self, x: float, y: float, text: str, *, size: float = NORMAL, at: Literal["left", "center", "right"] = "left",
        color: str = INK, bold: bool = False,
    ) -> None:  # fmt: skip
        """Write one line, centred on y."""
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, fontsize=size, ha=at, va="center_baseline", color=color, fontweight=weight)

    def line(
        self, x: float, y: float, to_x: float, to_y: float, *, color: str = INK, width: float = 1.0, arrow: bool = False
    ) -> None:
        """Draw a straight line, with a head at its end for an arrow."""
        if arrow:
            style = dict(arrowstyle="-|>", color=color, lw=width, shrinkA=0, shrinkB=0)
            self.axes.annotate("", xy=(to_x, to_y), xytext=(x, y), arrowprops=style)
        else:
            self.axes.plot([x, to_x], [y, to_y], color=color, linewidth=width, solid_capstyle="butt")

    def dot(self, x: float, y: float, *, color: str = INK, size: float = 5.0) -> None:
        """Draw a filled circle; size is its diameter in points."""
        self.axes.plot([x], [y], "o", color=color, markersize=size)

    def svg(self) -> bytes:
        """Return the drawing: letters are outlines, so that no reader needs a font."""
        import matplotlib

        out = io.BytesIO()
        settings = {"svg.hashsalt": "evenpack", "svg.fonttype": "path", "font.family": "DejaVu Sans", "hatch.linewidth": 0.6}
        with matplotlib.rc_context(settings):
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "evenpack", "Title": self.title})
        return out.getvalue()
