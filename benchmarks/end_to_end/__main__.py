"""One model, the same samples, six ways to make batches of them: tokens per second, memory, loss.

    python -m benchmarks.end_to_end                # 2 ranks, each on a core of its own; 3 rounds, about 4 minutes
    python -m benchmarks.end_to_end --quick        # 2 short rounds

Every training runs in fresh processes, forked from one that holds the encoded samples, over gloo. The modes take turns, in
another order each round. Several GPUs: `torchrun --nproc-per-node N -m benchmarks.end_to_end.worker`.
"""

import argparse
import functools
import os
import sys

import msgspec
import torch

from evenpack.scheduler.plan import warm_up
from evenpack.scheduler.testing import run_ranks

from .calibrate import measure_costs
from .data import make_model, make_samples, train_tokenizer
from .report import lines
from .training import MODES, Outcome, Setting, train


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add what both ways to start it share."""
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 timed steps")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of every mode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a training (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=16, help="samples per rank and step (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="capacity of a batch or pack (default: %(default)s)")
    parser.add_argument("--modes", default="".join(MODES), help="letters, a and e among them (default: %(default)s)")


def sizes(parser: argparse.ArgumentParser) -> tuple[list[str], int, Setting]:
    """Read the arguments; return modes, rounds and sizes."""
    options = parser.parse_args()
    unknown = set(options.modes) - set(MODES)
    if unknown or not {"a", "e"} <= set(options.modes):
        parser.error(f"--modes takes letters of {''.join(MODES)}, a and e among them, got {options.modes!r}")
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    return list(options.modes), rounds, Setting(capacity=options.max_tokens, samples_per_step=options.samples, steps=steps)


def turns(modes: list[str], rounds: int) -> list[str]:
    """Return the order of the trainings: every mode once a round, each round starting with another one."""
    return [letter for number in range(rounds) for letter in modes[number % len(modes) :] + modes[: number % len(modes)]]


def main() -> int:
    """Run all trainings; the exit code is 0 where every target was met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_sizes(parser)
    parser.add_argument("--ranks", type=int, default=2)
    modes, rounds, setting = sizes(parser)
    num_ranks = parser.parse_args().ranks
    torch.set_num_threads(1)
    warm_up()
    tokenizer = train_tokenizer()
    samples = [make_samples(0, rank, num_ranks, setting.num_samples, tokenizer) for rank in range(num_ranks)]
    model = functools.partial(make_model, tokenizer)
    cores = sorted(os.sched_getaffinity(0))
    cpu = torch.device("cpu")
    # In a process of its own, like the trainings: a process that has run a backward pass is no good to fork from.
    cost = run_ranks(lambda *_: measure_costs(model, samples[0] + samples[-1], cpu), 1, backend="gloo", timeout=1800)[0]
    setting = msgspec.structs.replace(setting, cost=cost)

    def one(letter: str, rank: int) -> Outcome:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        return train(MODES[letter], model, samples[rank], setting, cpu)

    found: dict[str, list[Outcome]] = {letter: [] for letter in modes}
    for letter in turns(modes, rounds):
        outcomes = run_ranks(lambda rank, _, letter=letter: one(letter, rank), num_ranks, backend="gloo", timeout=1800)
        found[letter].append(outcomes[0])
        print(f"({letter}) {outcomes[0].seconds:.1f} s", file=sys.stderr, flush=True)
    text = lines(found, setting.steps)
    print(f"{num_ranks} ranks, one core each ({len(cores)} cores), {setting.samples_per_step} samples a rank and step, "
          f"{setting.capacity} tokens a batch or pack, {rounds} rounds")  # fmt: skip
    quality = f"R^2 {cost.r_squared:.3f}, median error {cost.median_error:.1%}"
    print(f"costs: fitted to {cost.num_observations} micro-batches timed before, {quality}")
    print("\n".join(text))
    return int(any(line.startswith("MISS") for line in text))


if __name__ == "__main__":
    sys.exit(main())
