"""A small suite that shows whether a set of library versions works: each check raises, or says that it does not apply."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import evenpack
from evenpack.collate import pack_samples
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import PackingScheduler, PlanConfig, ProcessGroups, SampleTable, SchedulerConfig, plan_step
from evenpack.scheduler.plan import warm_up
from evenpack.scheduler.testing import run_ranks


class NotInstalled(Exception):
    """A library that a check needs is not there."""


def needs(*names: str) -> None:
    """Raise `NotInstalled` unless all modules can be found."""
    for name in names:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise NotInstalled(name)


def imports() -> None:
    """Every module of the core imports, and has the names that it says are public."""
    for package in ("core", "models", "collate", "scheduler", "cli"):
        root = importlib.import_module(f"evenpack.{package}")
        for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            module = importlib.import_module(info.name)
            assert all(hasattr(module, name) for name in getattr(module, "__all__", ())), info.name
    assert evenpack.__version__


def plan() -> None:
    """The planner compiles, and finds a plan with a known answer: two ranks, two micro-batches, at the lower bound."""
    warm_up()  # here, because the ranks of the next checks wait for each other for less time than compiling may take
    table = SampleTable.from_lengths([8, 8, 8, 8, 1, 1, 1, 1], home=[0, 0, 0, 0, 1, 1, 1, 1])
    found = plan_step(table, num_ranks=2, config=PlanConfig(max_tokens=10, sync="microbatch"))
    assert (found.value, found.lower_bound, found.padded.tolist()) == (18, 18, [[9, 9], [9, 9]])


def pack() -> None:
    """A pack with known boundaries and positions."""
    start, image, end = 151652, 151655, 151653
    picture = {
        "input_ids": [7, start, *[image] * 4, end, 8],
        "image_grid_thw": [[1, 4, 4]],
        "pixel_values": torch.zeros(16, 1176),
    }
    found = pack_samples([picture, {"input_ids": [3, 4, 5]}], adapter=adapter_for("qwen2_vl"), align=4, pack_align=16)
    assert found.cu_seqlens_q_padded.tolist() == [0, 8, 12, 16]
    assert found.position_ids[1, 0].tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 3]


def step() -> None:
    """A step of two processes over gloo: every sample once, balanced."""

    def on_rank(rank: int, num_ranks: int) -> tuple[list[Any], float]:
        lengths = ((90, 80, 70, 60), (10, 20, 30, 40))[rank]
        samples = [{"input_ids": [1] * length, "sample_id": length} for length in lengths]
        config = SchedulerConfig(max_tokens=256, samples_per_step=4, timeout=60.0)
        with PackingScheduler(
            samples, config=config, adapter=adapter_for("text"), groups=ProcessGroups.from_world()
        ) as scheduler:
            (found,) = [([name for batch in step for name in batch.sample_ids], step.stats.imbalance) for step in scheduler]
        return found

    found = run_ranks(on_rank, 2, backend="gloo", timeout=120)
    assert sorted(name for names, _ in found for name in names if name is not None) == [10, 20, 30, 40, 60, 70, 80, 90]
    assert max(imbalance for _, imbalance in found) < 1.05


def parity() -> None:
    """A tiny Qwen2.5-VL in fp64 computes in a pack what its samples compute alone, and the positions are its own."""
    needs("transformers")
    from ..models import tiny

    stock, prepared = tiny.tiny_model("qwen2_5_vl"), tiny.tiny_model("qwen2_5_vl")
    prepare_model(prepared)
    adapter, rng = adapter_for(stock.config), np.random.default_rng(0)
    raws = [tiny.random_sample(rng, adapter, media=count, sides=2, pixels=True) for count in (2, 0, 3)]
    batch = pack_samples(raws, adapter=adapter, align=8)
    with torch.no_grad():
        logits = prepared(**batch.forward_kwargs(prepared)).logits[0]
        for raw, start in zip(raws, batch.cu_seqlens_q_padded.tolist(), strict=False):
            given = {name: value[None] if name.endswith("_ids") else value for name, value in raw.items()}
            mask = torch.ones(1, len(raw["input_ids"]), dtype=torch.int64)
            alone = stock(**given, attention_mask=mask, use_cache=False).logits[0]
            assert float((logits[start : start + len(alone)] - alone).abs().max()) < 1e-12


def trainer() -> None:
    """Two steps of the Hugging Face Trainer on packs."""
    needs("transformers", "accelerate")
    import tempfile

    from ..integrations.trainer import tiny

    with tempfile.TemporaryDirectory() as folder:
        found, _ = tiny.packed_trainer(tiny.model_of(), tiny.arguments(folder, max_steps=2), train_dataset=tiny.samples(12))
        found.train()
    assert found.state.global_step == 2


def megatron() -> None:
    """`get_packed_batch` on two data-parallel ranks of Megatron-Core: every token once, boundaries of its own class."""
    needs("megatron.core", "pytest")
    from ..integrations.megatron import helpers

    rows = [chunk for rank in helpers.on_ranks(helpers.taken(helpers.own_samples([9, 3, 7, 5])), 2) for chunk in rank]
    assert len(rows) == 2 and all(row["params"]["qkv_format"] == "thd" for row in rows)
    assert all(row["params"]["cu_seqlens_q"][-1] == len(row["tokens"][0]) for row in rows)


#: In the order of the table's columns.
CHECKS: dict[str, Callable[[], None]] = {
    "import": imports,
    "plan": plan,
    "pack": pack,
    "2-rank step": step,
    "Qwen2.5-VL parity": parity,
    "Trainer": trainer,
    "Megatron-Core": megatron,
}
