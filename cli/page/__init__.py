"""One self-contained HTML page that shows planned steps: of a what-if, of a recorded run, or of two runs side by side.

`write_page(path, PageData(...))` needs the `report` extra (plotly, jinja2); importing this package does not.
"""

from .data import Curve, DrawnStep, PageData, RunView, Table
from .write import check_libraries, write_page

__all__ = ["Curve", "DrawnStep", "PageData", "RunView", "Table", "check_libraries", "write_page"]
