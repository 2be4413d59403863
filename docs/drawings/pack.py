"""A pack: segments, their boundaries, padding at their ends, and the tail of the row."""

import torch
from canvas import FAINT, INK, NORMAL, SMALL, Canvas

from evenpack.collate import PackedBatch, pack_samples
from evenpack.models import adapter_for

VISION_START, IMAGE, VISION_END = 151652, 151655, 151653
TEXT, PICTURE, PADDING = "#9ecae9", "#f5b041", "#e4e4e4"
LEFT, CELL, ROW = 78.0, 14.2, 24.0


def example() -> PackedBatch:
    """Return a pack of three samples: one with an image, two of text, padded to multiples of 4, the row to one of 12."""
    picture = {
        "input_ids": [7, VISION_START, *[IMAGE] * 4, VISION_END, 8],
        "image_grid_thw": [[1, 4, 4]],
        "pixel_values": torch.zeros(16, 1176),
    }
    texts = [{"input_ids": [3, 4, 5]}, {"input_ids": [6, 7, 8, 9, 10]}]
    return pack_samples([picture, *texts], adapter=adapter_for("qwen2_vl"), align=4, pack_align=12)


def draw() -> Canvas:
    """Draw the pack's slots, targets, time positions and boundaries."""
    pack = example()
    slots = pack.input_ids.shape[1]
    canvas = Canvas("A pack of three samples, slot by slot", 214)
    rows = {name: 34.0 + ROW * index for index, name in enumerate(("tokens", "trains", "position"))}
    for name, y in rows.items():
        canvas.text(LEFT - 8, y + ROW / 2, name, at="right")
    for slot in range(slots):
        x, padded = LEFT + CELL * slot, bool(pack.padding_mask[0, slot])
        media = bool(pack.media_token_validity_mask[0, slot])
        canvas.box(x, rows["tokens"], CELL, ROW, PADDING if padded else PICTURE if media else TEXT)
        if pack.loss_mask[0, slot] > 0:
            canvas.dot(x + CELL / 2, rows["trains"] + ROW / 2)
        position = str(int(pack.position_ids[0, 0, slot]))
        canvas.text(x + CELL / 2, rows["position"] + ROW / 2, position, size=9.5, at="center", color=FAINT if padded else INK)
    _segments(canvas, pack)
    _boundaries(canvas, pack, rows["position"] + ROW)
    for index, (color, name) in enumerate(((TEXT, "text"), (PICTURE, "image"), (PADDING, "padding"))):
        canvas.box(LEFT + 84 * index, 190, 14, 14, color)
        canvas.text(LEFT + 84 * index + 20, 197, name)
    canvas.dot(LEFT + 262, 197)
    canvas.text(LEFT + 272, 197, "has a target")
    return canvas


def _segments(canvas: Canvas, pack: PackedBatch) -> None:
    edges = pack.cu_seqlens_q_padded.tolist()
    names = ("sample A", "B", "sample C", "tail")
    for name, start, end in zip(names, edges[:-1], edges[1:], strict=True):
        canvas.text(LEFT + CELL * (start + end) / 2, 18, name, size=SMALL, at="center")
    for edge in edges:
        canvas.line(LEFT + CELL * edge, 28, LEFT + CELL * edge, 112, width=1.4)


def _boundaries(canvas: Canvas, pack: PackedBatch, top: float) -> None:
    real, padded = pack.cu_seqlens_q.tolist(), pack.cu_seqlens_q_padded.tolist()
    for y, name, values in ((top + 24, "padded", padded), (top + 48, "real", real)):
        canvas.text(LEFT - 8, y, name, at="right")
        for value, edge in zip(values, padded, strict=True):
            canvas.text(LEFT + CELL * edge, y, str(value), at="center", size=NORMAL, bold=True)
    canvas.text(LEFT + CELL * 2.2, top + 66, "boundaries: cu_seqlens_q_padded and cu_seqlens_q", size=SMALL, color=FAINT)
