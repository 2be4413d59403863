"""Many steps of anything: every sample exactly once and unchanged, through early ends, faults and resumes."""

import os
import random
import zlib

import torch

from evenpack.core import EvenpackError, Field
from evenpack.scheduler.sources import CountingSource
from evenpack.scheduler.testing import run_ranks

from .helpers import VISION, image_sample, open_scheduler, text_sample

#: Steps of the whole run; `make test-full` takes 200, a nightly run 2,000.
STEPS = int(os.environ.get("EVENPACK_SOAK_STEPS", "30"))
FIELDS = [
    Field(name="advantages", kind="token", dtype="float32", default=0.0),
    Field(name="note", kind="sample", dtype="text", default=""),
    Field(name="table", kind="sample", dtype="any", shape=None),
]


def sample_of(rank, number):
    """Return a sample of any kind; the same for the same rank and number."""
    rng = random.Random(f"soak-{rank}-{number}")
    name = f"{rank}-{number}"
    if rng.random() < 0.3:
        grids = [(1, 2 * rng.randrange(1, 4), 2 * rng.randrange(1, 4)) for _ in range(rng.randrange(1, 3))]
        sample = image_sample(grids, name, text=rng.randrange(1, 9), seed=rng.randrange(1 << 20))
    else:
        sample = text_sample(rng.choice([2, 5, 30, 90]), name)
    if rng.random() < 0.5:
        sample["advantages"] = torch.full((len(sample["input_ids"]),), rng.random())
    if rng.random() < 0.3:
        sample["note"] = "n" * rng.randrange(40)
    if rng.random() < 0.2:
        sample["table"] = torch.arange(rng.randrange(1, 30), dtype=torch.int16)
    return sample


def checksum(batch, segment):
    """Return a checksum of a segment's tokens, targets and fields."""
    start, end = int(batch.cu_seqlens_q_padded[segment]), int(batch.cu_seqlens_q_padded[segment])
    end = start + int(batch.cu_seqlens_q[segment + 1] - batch.cu_seqlens_q[segment])
    parts = [batch.input_ids[0, start:end], batch.labels[0, start : end - 1], batch.advantages[0, start:end]]
    table = batch.table[segment]
    data = b"".join(part.contiguous().numpy().tobytes() for part in [*parts, *([] if table is None else [table])])
    return zlib.crc32(data + batch.note[segment].encode())


def expected(rank, number):
    """Return the same checksum from the raw sample."""
    sample = sample_of(rank, number)
    ids = sample["input_ids"]
    labels = ids.masked_fill(ids == VISION.media_tokens["image"], -100)[1:]
    parts = [ids, labels, sample.get("advantages", torch.zeros(len(ids)))]
    parts += [sample["table"]] if "table" in sample else []
    data = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    return zlib.crc32(data + sample.get("note", "").encode())


class Life:
    """One epoch's samples; raises once at each planted place."""

    def __init__(self, rank, first, count, faults):
        self.rank, self.first, self.count, self.faults = rank, first, count, faults

    def __iter__(self):
        for number in range(self.first, self.first + self.count):
            if number in self.faults:
                self.faults.discard(number)
                raise OSError("planted")
            yield sample_of(self.rank, number)


def live(rank, num_ranks):
    """Train on epochs of random size until enough steps are done; return checksums by sample, and the number of steps."""
    rng, own = random.Random("soak"), random.Random(f"soak {rank}")
    seen, steps, first = {}, 0, 0
    while steps < STEPS:
        counts = [rng.randrange(0, 150) for _ in range(num_ranks)]
        prefetch, sync = rng.randrange(3), rng.choice(["step", "microbatch"])
        settings = {"prefetch": prefetch, "sync": sync, "lookahead": rng.choice([1, 3])}
        faults = {first + own.randrange(150)} if own.random() < 0.4 else set()
        source, state, done = Life(rank, first, counts[rank], faults), None, False
        while not done:
            with open_scheduler(CountingSource(source), adapter=VISION, fields=FIELDS, **settings) as scheduler:
                if state is not None:
                    scheduler.load_state_dict(state)
                try:
                    for step in scheduler:
                        for batch in step:
                            for segment, name in enumerate(batch.sample_ids):
                                if name is not None:
                                    assert name not in seen, name
                                    seen[name] = checksum(batch, segment)
                        state, steps = scheduler.state_dict(), steps + 1
                    done = True
                except EvenpackError:
                    pass  # a fault on some rank: all ranks resume behind the last step
        first += counts[rank]
    return seen, steps, first


def test_every_sample_exactly_once_and_unchanged():
    outcomes = run_ranks(live, 4, backend="gloo", timeout=60 + 2 * STEPS)
    assert len({steps for _, steps, _ in outcomes}) == 1
    names = [name for seen, _, _ in outcomes for name in seen]
    assert sorted(names) == sorted(f"{rank}-{number}" for rank, (_, _, total) in enumerate(outcomes) for number in range(total))
    assert all(value == expected(*map(int, name.split("-"))) for seen, _, _ in outcomes for name, value in seen.items())
