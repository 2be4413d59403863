"""Packing 64 samples against one `torch.cat` per field, in the same run.

    python -m benchmarks.packing                      # 262,144 tokens, 256 images, all fields
    python -m benchmarks.packing --align 8 --side 32  # padded segments, larger images

The opponent does less: its pieces (positions, types, masks and shifted labels of every sample among them) lie ready, and it
neither pads nor computes anything. It is the least that any packer has to pay for moving the bytes.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from evenpack.collate import PackedBatch, pack_samples, prepare_sample
from evenpack.core import Sample
from evenpack.models import adapter_for

IMAGE, START, END = 151655, 151652, 151653
SAMPLES, TOKENS, IMAGES = 64, 4096, 4


def build_sample(rng: np.random.Generator, tokens: int, side: int, pixels: bool) -> Sample:
    """Return a sample of `tokens` tokens with IMAGES images of side x side patches, or text alone."""
    adapter = adapter_for("qwen2_5_vl")
    ids = rng.integers(0, 150_000, tokens)
    raw = {"input_ids": ids}
    if pixels:
        anchors = side * side // 4
        for at in np.linspace(0, tokens - anchors - 2, IMAGES).astype(int):
            ids[at : at + anchors + 2] = [START, *[IMAGE] * anchors, END]
        rows = IMAGES * side * side
        raw["image_grid_thw"] = np.array([[1, side, side]] * IMAGES)
        raw["pixel_values"] = rng.random((rows, adapter.patch_dim), dtype=np.float32)
    return prepare_sample(raw, adapter=adapter)


def ready_pieces(samples: list[Sample], pack: PackedBatch) -> list[tuple[list[torch.Tensor], int]]:
    """Return what the opponent joins: for every field of the pack, one contiguous piece per sample, and the axis."""
    fields = []
    for tensor, axis in pack.token_tensors().values():
        fields.append(([part.contiguous() for part in pack.unpack(tensor, axis=axis)], max(axis - 1, 0)))
    for name in pack.media:
        fields.append(([sample.tensor(name) for sample in samples if name in sample.values], 0))
    return fields


def timed(run: Callable[[], object]) -> float:
    """Return the milliseconds of one call; its result is freed outside the clock."""
    start = time.perf_counter()
    result = run()
    elapsed = time.perf_counter() - start
    del result
    return 1e3 * elapsed


def compare(label: str, samples: list[Sample], align: int, rounds: int) -> float:
    """Time both in turn, print medians and spreads, and return the median of the rounds' ratios."""
    adapter = adapter_for("qwen2_5_vl")
    pack = pack_samples(samples, adapter=adapter, align=align)
    fields = ready_pieces(samples, pack)
    size = sum(piece.nbytes for pieces, _ in fields for piece in pieces) / 2**20
    ours, theirs = [], []
    for _ in range(rounds + 2):  # the first two warm caches and the allocator
        ours.append(timed(lambda: pack_samples(samples, adapter=adapter, align=align)))
        theirs.append(timed(lambda: [torch.cat(pieces, dim=axis) for pieces, axis in fields]))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)][2:]
    print(f"{label}: {pack.total_tokens} slots, {len(fields)} fields, {size:.0f} MiB")
    for name, times in (("pack_samples", ours[2:]), ("one torch.cat per field", theirs[2:])):
        print(f"  {name:24} median {statistics.median(times):8.1f} ms   spread {min(times):.1f} .. {max(times):.1f}")
    print(
        f"  ratio                    median {statistics.median(ratios):8.2f}      spread {min(ratios):.2f} .. {max(ratios):.2f}"
    )
    return statistics.median(ratios)


def main() -> None:
    """Run the comparison with and without pixels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--align", type=int, default=1, help="multiple to which segments are padded")
    parser.add_argument("--side", type=int, default=16, help="patches along a side of an image (16: 224 pixels)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    # A segment that needs padding is one token short of a multiple of everything.
    tokens = TOKENS if options.align == 1 else TOKENS - 1
    with_pixels = [build_sample(rng, tokens, options.side, True) for _ in range(SAMPLES)]
    compare("images", with_pixels, options.align, options.rounds)
    compare("text", [build_sample(rng, tokens, 0, False) for _ in range(SAMPLES)], options.align, options.rounds)


if __name__ == "__main__":
    main()
