"""The flow of a step: the stages in their order, and the parts that each imports."""

from canvas import FAINT, INK, RANKS, SMALL, WAIT, WIDTH, Canvas

#: Modules of `evenpack.scheduler` in the order in which a sample passes them, and the word for what each does.
STAGES = {
    "stages.collect": "collect",
    "stages.describe": "describe",
    "stages.gather": "gather",
    "stages.select": "select",
    "stages.planning": "plan",
    "stages.exchange": "exchange",
    "step": "pack, yield",
    "stages.return_home": "return home",
}
#: Modules of the stages folder that are no stage.
HELPERS = {"stages.blocks": "a sample as one block of bytes"}
#: What stages may import: packages below `evenpack`, top to bottom.
PARTS = ("scheduler.sources", "collate", "models", "scheduler.comm", "scheduler.plan")
_COLORS = dict(zip(PARTS, (*RANKS, INK), strict=True))
#: Stages that the worker thread runs; the others run where the training loop asks.
NUM_PREFETCHED = 6

_LEFT, _WIDTH, _TOP, _ROW, _HEIGHT = 92.0, 106.0, 62.0, 40.0, 24.0
_RIGHT = WIDTH - 8 - 132


def imports() -> dict[str, set[str]]:
    """Return the parts that each stage imports.

    Raises:
        ValueError: a module of the stages folder that this drawing does not know, or one that is gone.
    """
    import grimp

    graph = grimp.build_graph("evenpack", cache_dir=None)
    there = {name.removeprefix("evenpack.scheduler.") for name in graph.find_children("evenpack.scheduler.stages")}
    known = {name for name in (*STAGES, *HELPERS) if name.startswith("stages.")}
    if there != known:
        raise ValueError(f"scheduler/stages holds {sorted(there)}, the drawing knows {sorted(known)}")
    found = {}
    for stage in STAGES:
        imported = graph.find_modules_directly_imported_by(f"evenpack.scheduler.{stage}")
        names = [name.removeprefix("evenpack.") for name in imported]
        found[stage] = {part for part in PARTS for name in names if f"{name}.".startswith(f"{part}.")}
    return found


def draw() -> Canvas:
    """Draw the stages at the left, the parts at the right, and a line for each import."""
    canvas = Canvas("The stages of a step in their order, and the parts of the package that each imports", 400)
    canvas.text(_LEFT, 18, "pipeline.py calls the stages", bold=True)
    canvas.text(_RIGHT, 18, "they import", bold=True)
    canvas.text(_LEFT, 38, "next(scheduler)", size=SMALL)
    canvas.line(_LEFT + _WIDTH / 2, 46, _LEFT + _WIDTH / 2, _TOP, arrow=True)
    found = imports()
    middle = {part: _TOP + 12 + number * (len(STAGES) - 1) * _ROW / (len(PARTS) - 1) for number, part in enumerate(PARTS)}
    for number, (stage, word) in enumerate(STAGES.items()):
        y = _TOP + number * _ROW
        for part in found[stage]:
            canvas.line(_LEFT + _WIDTH, y + _HEIGHT / 2, _RIGHT, middle[part], color=_COLORS[part])
        canvas.box(_LEFT, y, _WIDTH, _HEIGHT, WAIT, edge=FAINT)
        canvas.text(_LEFT + _WIDTH / 2, y + _HEIGHT / 2, word, at="center")
        if number + 1 < len(STAGES):
            canvas.line(_LEFT + _WIDTH / 2, y + _HEIGHT, _LEFT + _WIDTH / 2, y + _ROW, arrow=True)
    for part, y in middle.items():
        canvas.box(_RIGHT, y - 12, 132, 24, "white", edge=_COLORS[part])
        canvas.text(_RIGHT + 66, y, part.replace(".", "/"), at="center", size=SMALL)
    _thread(canvas, 0, NUM_PREFETCHED, "worker", "thread")
    _thread(canvas, NUM_PREFETCHED, len(STAGES), "training", "thread")
    return canvas


def _thread(canvas: Canvas, start: int, stop: int, *lines: str) -> None:
    top, bottom = _TOP + start * _ROW, _TOP + (stop - 1) * _ROW + _HEIGHT
    canvas.line(_LEFT - 12, top, _LEFT - 12, bottom, color=FAINT, width=1.5)
    for number, line in enumerate(lines):
        canvas.text(_LEFT - 18, (top + bottom) / 2 + 13 * (number - (len(lines) - 1) / 2), line, at="right", size=SMALL)
