"""Does a window of several steps change what a model learns? The same samples, one, four and eight steps in view, some seeds.

    python -m benchmarks.convergence digits documents            # both tasks, five seeds, half an hour on one core
    python -m benchmarks.convergence documents --seeds 1 --steps 40
    python -m benchmarks.convergence --plot docs/images/convergence.png

Two tasks: the demo's tiny Qwen2.5-VL on digits, photos and documents (held-out digits read), and a small decoder on
documentation of Python packages (loss on held-out documents). A step's gradient depends on which samples it holds, not on where
they run: so steps of eight ranks are chosen as the scheduler chooses them, and trained here in one process. Each run is
appended to a file of JSON lines, and those that are in it are not run again.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from evenpack.collate import pack_samples, prepare_sample
from evenpack.core import Sample
from evenpack.models import ModelAdapter, adapter_for, prepare_model
from evenpack.scheduler import PlanConfig, SampleTable
from evenpack.scheduler.loss import packed_loss
from evenpack.scheduler.plan.window import WindowBounds, roll

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

NUM_RANKS, MAX_TOKENS = 8, 2048
#: Samples of a rank in a step, and optimizer steps.
PER_RANK, STEPS = {"digits": 4, "documents": 2}, {"digits": 120, "documents": 60}
LOOKAHEADS = (1, 4, 8)
LEARNING_RATE, WARMUP_STEPS = 1.5e-3, 10
#: Documents of which the model never sees a token, one in so many.
HELD_OUT = 10
TASKS = ("digits", "documents")


class Task:
    """A model, its samples of every rank in order, and what is measured at the end."""

    def __init__(self, name: str, seed: int, steps: int, folder: Path) -> None:
        from demo.tokenizer import shared_tokenizer  # type: ignore[import-not-found]

        self.name, self.seed = name, seed
        self.tokenizer = shared_tokenizer(folder / "tokenizer", 0, lambda: None)
        count = steps * PER_RANK[name]
        if name == "digits":
            self._digits(count)
        else:
            self._documents(count)

    def _digits(self, count: int) -> None:
        from demo.data import ChatExamples, held_out_examples  # type: ignore[import-not-found]
        from demo.model import build_model  # type: ignore[import-not-found]
        from demo.processing import encode, make_processor  # type: ignore[import-not-found]

        processor = make_processor("qwen2_5_vl", self.tokenizer)
        self.model = prepare_model(build_model("qwen2_5_vl", self.tokenizer, self.seed)).train()
        self.adapter = adapter_for(self.model.config)
        sources = [ChatExamples(self.seed, rank, NUM_RANKS) for rank in range(NUM_RANKS)]
        self.samples = [[self._prepared(encode(processor, source[i])) for i in range(count)] for source in sources]
        self.held_out = [self._prepared(encode(processor, example)) for example in held_out_examples()]

    def _documents(self, count: int) -> None:
        from demo.documents import load_documents  # type: ignore[import-not-found]

        torch.manual_seed(self.seed)
        config = Qwen2Config(
            vocab_size=len(self.tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=MAX_TOKENS, tie_word_embeddings=True,
        )  # fmt: skip
        self.model = prepare_model(Qwen2ForCausalLM(config)).train()
        self.adapter = adapter_for("text")
        texts = [document.text for document in load_documents(2400)]
        prepared = [self._prepared({"input_ids": ids, "labels": ids}) for ids in map(self._ids, texts)]
        self.held_out = prepared[::HELD_OUT]
        rest = [sample for index, sample in enumerate(prepared) if index % HELD_OUT]
        rng = random.Random(self.seed)
        self.samples = [[rng.choice(rest) for _ in range(count)] for _ in range(NUM_RANKS)]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"][:MAX_TOKENS]
        return ids

    def _prepared(self, raw: Any) -> Sample:
        return prepare_sample(raw, adapter=self.adapter)

    @torch.no_grad()
    def measure(self) -> float:
        """Return the share of held-out digits that is read, or the loss per token of held-out documents."""
        self.model.eval()
        total = count = 0.0
        for batch in packs(self.held_out, self.adapter):
            logits = self.model(**batch.forward_kwargs(self.model)).logits
            if self.name == "documents":
                tokens = float(batch.loss_mask.sum())
                total += float(packed_loss(logits, batch, divisor=1.0, num_replicas=1))
                count += tokens
                continue
            for guess, targets in zip(batch.unpack(logits.argmax(-1)), batch.unpack(batch.shift_labels), strict=True):
                first = int((targets != -100).nonzero()[0])
                total, count = total + float(guess[first] == targets[first]), count + 1
        self.model.train()
        return total / count


def packs(samples: Sequence[Sample], adapter: ModelAdapter) -> Iterator[Any]:
    """Yield samples in packs, in order."""
    held: list[Sample] = []
    for sample in samples:
        if held and sum(one.num_tokens for one in held) + sample.num_tokens > MAX_TOKENS:
            yield pack_samples(held, adapter=adapter)
            held = []
        held.append(sample)
    yield pack_samples(held, adapter=adapter)


def steps_of(task: Task, steps: int, lookahead: int) -> Iterator[list[Sample]]:
    """Yield the samples of every step, as the scheduler chooses them on `NUM_RANKS` ranks."""
    per_rank = PER_RANK[task.name]
    numbered = [[task.samples[rank][i] for rank in range(NUM_RANKS) for i in range(at * per_rank, (at + 1) * per_rank)]
                for at in range(steps)]  # fmt: skip
    every = [sample for step in numbered for sample in step]
    home = np.repeat(np.arange(NUM_RANKS), per_rank)
    tables = []
    for number, step in enumerate(numbered):
        lengths = np.array([sample.num_tokens for sample in step])
        ids = np.arange(len(step)) + number * len(step)  # in the place of bytes, which nothing here depends on
        tables.append(SampleTable.from_lengths(lengths, cost=1024 * lengths + lengths**2 // 64, home=home, nbytes=ids))
    config = PlanConfig(max_tokens=MAX_TOKENS, sync="microbatch")
    bounds = WindowBounds(lookahead=lookahead, tokens=0.1, samples=0.5)
    for table, _ in roll(tables, num_ranks=NUM_RANKS, config=config, capacity=MAX_TOKENS, bounds=bounds):
        yield [every[index] for index in table.nbytes.tolist()]


def train(task: Task, steps: int, lookahead: int) -> dict[str, Any]:
    """Train on all samples; return losses and the measure."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / steps))
    losses, tokens = [], []
    for samples in steps_of(task, steps, lookahead):
        batches = list(packs(samples, task.adapter))
        divisor = sum(float(batch.loss_mask.sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = packed_loss(task.model(**batch.forward_kwargs(task.model)).logits, batch, divisor=divisor, num_replicas=1)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step(), rates.step(), optimizer.zero_grad()
        losses.append(total)
        tokens.append(sum(sample.num_tokens for sample in samples))
    spread = max(tokens) * len(tokens) / sum(tokens)
    return {
        "task": task.name, "seed": task.seed, "steps": steps, "lookahead": lookahead, "losses": losses,
        "final_loss": statistics.fmean(losses[-10:]), "largest_step": spread, "measure": task.measure(),
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> None:
    """Print means and spreads over the seeds."""
    for task in TASKS:
        for lookahead in LOOKAHEADS:
            found = [run for run in runs if run["task"] == task and run["lookahead"] == lookahead]
            if not found:
                continue
            cells = []
            for name in ("measure", "final_loss", "largest_step"):
                values = [run[name] for run in found]
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                cells.append(f"{name} {statistics.fmean(values):.4f} +- {spread:.4f}")
            print(f"{task:10s} lookahead {lookahead}  seeds {len(found)}  {'  '.join(cells)}")


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss curves, the mean of the seeds in bold."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [task for task in TASKS if any(run["task"] == task for run in runs)]
    figure, axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 3.8), squeeze=False)
    for axis, task in zip(axes[0], names, strict=True):
        for color, lookahead in zip(("C0", "C1", "C2"), LOOKAHEADS, strict=True):
            curves = [smoothed(run["losses"]) for run in runs if run["task"] == task and run["lookahead"] == lookahead]
            for curve in curves:
                axis.plot(curve, color=color, alpha=0.2, linewidth=0.8)
            axis.plot(np.mean(curves, axis=0), color=color, linewidth=1.8, label=f"lookahead {lookahead}")
        axis.set(title=f"{task}, {len(curves)} seeds", xlabel="optimizer step", ylabel="training loss, mean of 10 steps")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def smoothed(losses: list[float], width: int = 10) -> Any:
    """Return the running mean."""
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def main() -> None:
    """Run what is missing, and print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="task", help="tasks to run")
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--steps", type=int, help="default: 120 for digits, 60 for documents")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), help="default: runs/convergence")
    parser.add_argument("--plot", type=Path, help="write the loss curves as a picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "runs.jsonl"
    torch.set_num_threads(1)
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for seed in range(options.seeds):
        for name in options.tasks:
            for lookahead in LOOKAHEADS:
                steps = options.steps or STEPS[name]
                key = {"task": name, "seed": seed, "steps": steps, "lookahead": lookahead}
                if any(key.items() <= run.items() for run in done):
                    continue
                done.append(train(Task(name, seed, steps, options.out), steps, lookahead))
                with log.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(key, round(done[-1]["measure"], 4), flush=True)
    table(done)
    if options.plot:
        plot(done, options.plot)


if __name__ == "__main__":
    main()
