"""The page as one file: the template filled with figures, the plotting library inside."""

from pathlib import Path
from typing import Any

from .data import PageData

#: Buttons of the figures that make sense on a page that nobody edits.
_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False, "scrollZoom": False, "doubleClick": "reset"}


def write_page(path: str | Path, data: PageData) -> None:
    """Write the page as one HTML file that loads nothing: it opens from disk, without a network, on any screen.

    Args:
        path: the file; an existing one is replaced.
        data: what to show. For two runs side by side give two `RunView`s in `PageData.runs`: each gets a column, both
            get the same axes; tables that compare them go to `PageData.tables`.

    Raises:
        ValueError: the `report` extra is not installed.

    Example:
        >>> from evenpack.cli.page import DrawnStep, PageData, RunView
        >>> from evenpack.scheduler.plan import PlanConfig, SampleTable, plan_step
        >>> table = SampleTable.from_lengths([8, 8, 1, 1], home=[0, 0, 1, 1])
        >>> config = PlanConfig(max_tokens=10)
        >>> drawn = DrawnStep(
        ...     title="Step 0", table=table, plan=plan_step(table, num_ranks=2, config=config), config=config
        ... )
        >>> run = RunView(name="a run", drawn=drawn, lengths=[8, 8, 1, 1], load_before=[16, 2], load_after=[9, 9])
        >>> write_page("page.html", PageData(title="My run", runs=(run,)))  # doctest: +SKIP
    """
    Path(path).write_text(render(data), encoding="utf-8")


def check_libraries() -> None:
    """Raise `ValueError` unless what a page needs is installed: better before long work than after it."""
    try:
        import jinja2
        import plotly.io
        import plotly.offline
    except ImportError as error:
        raise ValueError(f"an HTML page needs {error.name}: pip install 'evenpack[report]'") from None
    assert jinja2 and plotly


def render(data: PageData) -> str:
    """Return the page's text.

    Raises:
        ValueError: the `report` extra is not installed.
    """
    check_libraries()
    import jinja2
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    from .figures import run_figures

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )

    def markup(figure: Any, name: str) -> Any:
        return environment.filters["safe"](
            to_html(figure, full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=name, default_height="100%")
        )

    columns = []
    for number, figures in enumerate(run_figures(data.runs)):
        columns.append(
            [
                {"title": one.title, "note": one.note, "height": one.height, "html": markup(one.figure, f"figure-{number}-{k}")}
                for k, one in enumerate(figures)
            ]
        )
    template = environment.get_template("template.html")
    return template.render(data=data, columns=columns, library=environment.filters["safe"](get_plotlyjs()))
