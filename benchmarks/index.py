"""Building an offline index of real documents and images: how much it costs beyond tokenisation, and how it opens.

    python -m benchmarks.index
    python -m benchmarks.index --samples 20000 --workers 1

Documents are pieces of the Python sources on this machine, images are the photographs that come with scikit-image and
matplotlib, saved as files in many sizes; half of the samples have one to three of them. Prints the CPU time of tokenising
the same texts alone and of building the index (all processes), the difference spread over two cores, the time to open the
index, and the memory that opening and planning take at two sizes. Targets: under 60 s beyond tokenisation for 100,000
samples on 2 cores, opens in under 100 ms, memory independent of size.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .encode import LIMITS, make_tools, photographs

CHARACTERS = (200, 4000)
OPEN = """
import json, resource, sys, time
import numpy as np
from evenpack.models import adapter_for
from evenpack.scheduler import OfflineConfig, OfflineIndex
OfflineIndex(sys.argv[1]).tokens([0])
times = []
for _ in range(20):
    started = time.perf_counter()
    index = OfflineIndex(sys.argv[1])
    index.tokens([0, len(index) - 1])
    times.append(time.perf_counter() - started)
config = OfflineConfig(max_tokens=8192, samples_per_step=64, oversize="drop")
planner = index.planner(config, adapter_for("qwen3_vl"), num_ranks=8)
for step, _ in zip(planner.steps(0), range(3)): pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started, steps = time.process_time(), 0
for step in planner.steps(1):
    steps += 1
    if steps == 100: break
planned = (time.process_time() - started) / steps
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"open_ms": sorted(times)[10] * 1e3, "slowest_ms": max(times) * 1e3, "rss_mib": before / 1024,
                  "grown_mib": grown / 1024, "plan_ms": planned * 1e3}))
"""


class Corpus(Sequence[dict[str, Any]]):
    """Examples by number, each made from its number alone: a question about a document, with images as files.

    Args:
        texts: whole documents.
        images: paths of image files.
        count: number of examples.
    """

    def __init__(self, texts: Sequence[str], images: Sequence[str], count: int) -> None:
        self._texts, self._images, self._count = texts, images, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:  # type: ignore[override]
        rng = random.Random(number)
        text = rng.choice(self._texts)
        start = rng.randrange(max(1, len(text) - 200))
        parts = [{"type": "text", "text": text[start : start + rng.randint(*CHARACTERS)]}]
        images = [rng.choice(self._images) for _ in range(rng.randint(1, 3))] if rng.random() < 0.5 else []
        answer = [{"type": "text", "text": text[:200]}]
        messages = [
            {"role": "user", "content": [{"type": "image"}] * len(images) + parts},
            {"role": "assistant", "content": answer},
        ]
        return {"messages": messages, "images": images, "sample_id": number}


def write_images(folder: Path, count: int) -> list[str]:
    """Save the photographs as files in many sizes, and return their paths."""
    rng, found, paths = random.Random(0), photographs(), []
    for number in range(count):
        picture = found[number % len(found)]
        scale = rng.uniform(0.3, 1.5)
        path = folder / f"{number}.{'png' if number % 2 else 'jpg'}"
        picture.resize((max(32, int(picture.width * scale)), max(32, int(picture.height * scale)))).save(path)
        paths.append(str(path))
    return paths


def sources(count: int) -> list[str]:
    """Return whole Python sources of this machine, the standard library's and those of installed packages."""
    roots = [Path(os.__file__).parent, *(Path(path) for path in sys.path if path.endswith("site-packages"))]
    files = [file for root in roots for file in sorted(root.rglob("*.py"))]
    random.Random(1).shuffle(files)
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files[: 2 * count])
    return [text for text in texts if len(text) > CHARACTERS[0]][:count]


def used() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def tokenised(encoder: Any, corpus: Corpus, chunk: int) -> float:
    """Return the CPU seconds of tokenising the texts of every example, and nothing else."""
    total = 0.0
    for start in range(0, len(corpus), chunk):
        examples = [corpus[place] for place in range(start, min(start + chunk, len(corpus)))]
        texts = [encoder.write(example, "").text for example in examples]
        started = used()
        encoder.tokenizer(texts, return_attention_mask=False)
        total += used() - started
    return total


def opened(folder: Path) -> dict[str, float]:
    """Return how an index opens and plans in a process of its own."""
    out = subprocess.run([sys.executable, "-c", OPEN, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Build, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=1024)
    arguments = parser.parse_args()

    from evenpack.collate import SampleEncoder
    from evenpack.scheduler import OfflineIndex

    processor, adapter = make_tools()
    encoder = SampleEncoder(processor, adapter, **LIMITS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Corpus(sources(2000), write_images(folder, 400), arguments.samples)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        results = {}
        for label, count in (("tenth", arguments.samples // 10), ("whole", arguments.samples)):
            part = Corpus(corpus._texts, corpus._images, count)
            before, started = used(), time.perf_counter()
            OfflineIndex.build(
                folder / label, part, encoder, workers=arguments.workers, chunk=arguments.chunk, progress=label == "whole"
            )
            results[label] = (used() - before, time.perf_counter() - started, opened(folder / label))
        alone = tokenised(encoder, corpus, arguments.chunk)
        index = OfflineIndex(folder / "whole")
        print(
            f"{arguments.samples:,} samples, {index.num_tokens:,} tokens, {index.num_media:,} images, "
            f"{arguments.workers} workers"
        )
    cpu, wall, _ = results["whole"]
    print(f"tokenising alone       {alone:8.1f} s CPU")
    print(f"building the index     {cpu:8.1f} s CPU, {wall:.1f} s wall")
    print(f"beyond tokenisation    {cpu - alone:8.1f} s CPU = {(cpu - alone) / 2:.1f} s on 2 cores (target: under 60)")
    for label, (_, _, own) in results.items():
        print(
            f"{label}: opens in {own['open_ms']:.2f} ms (slowest {own['slowest_ms']:.2f}; target: under 100), "
            f"process {own['rss_mib']:.0f} MiB, {own['grown_mib']:.1f} MiB more after 100 planned steps, "
            f"{own['plan_ms']:.1f} ms a step of 512 samples on 8 ranks"
        )


if __name__ == "__main__":
    main()
