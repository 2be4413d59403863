"""What stands around the code of a page: a tiny model, processor and data, files where the page has `path/to/...`."""

import contextlib
import copy
import functools
import io
import multiprocessing
import os
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evenpack.collate import SampleEncoder, load_processor, pack_samples
from evenpack.models import adapter_for, prepare_model
from evenpack.scheduler import CostModel, PackingScheduler, ProcessGroups, SchedulerConfig

from .pages import ROOT

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "megatron")]
CHECKPOINT = "path/to/checkpoint"
LIMITS = {"min_pixels": 56 * 56, "max_pixels": 1024 * 1024}
#: Steps of a page that trains for thousands of them.
MAX_STEPS = 2


def write_files(folder: Path) -> None:
    """Write what pages read into an empty folder: a checkpoint, pictures, examples."""
    from demo.model import build_model
    from demo.processing import make_processor
    from demo.tokenizer import train_tokenizer
    from PIL import Image

    tokenizer = train_tokenizer()
    processor = make_processor("qwen2_5_vl", tokenizer)
    type(processor).__name__ = "Qwen2_5_VLProcessor"  # what a saved processor says about itself
    for name in (CHECKPOINT, "path/to/processor"):
        processor.save_pretrained(folder / name)
    build_model("qwen2_5_vl", tokenizer, seed=0).save_pretrained(folder / CHECKPOINT)
    rng = random.Random(0)
    for number in range(8):
        Image.new("RGB", (rng.randrange(60, 200), rng.randrange(60, 200)), f"hsl({45 * number}, 80%, 50%)").save(
            folder / f"{number}.png"
        )


def rows(count: int = 48) -> list[dict[str, Any]]:
    """Return rows of a table: a picture in every second one, a question and an answer of uneven length."""
    return [
        {
            "file": f"{index % 8}.png" if index % 2 else None,
            "question": "What is this? " * (1 + index % 7),
            "answer": f"Number {index}.",
        }
        for index in range(count)
    ]


def chats(count: int = 48) -> list[dict[str, Any]]:
    """Return the same as conversations."""
    found = []
    for index, row in enumerate(rows(count)):
        media = [{"type": "image", "path": row["file"]}] if row["file"] else []
        question = {"role": "user", "content": [*media, {"type": "text", "text": row["question"]}]}
        found.append({"messages": [question, {"role": "assistant", "content": row["answer"]}], "sample_id": index})
    return found


class CountingSGD(torch.optim.SGD):
    """Counts its steps."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).num_steps += 1
        return super().step(closure)


@functools.cache
def shared() -> dict[str, Any]:
    """Return what all pages start from; made once, in the folder of files, before ranks are forked."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT)
    processor = load_processor(CHECKPOINT)
    encoder = SampleEncoder(processor, adapter_for(model.config), **LIMITS)
    return dict(model=model, processor=processor, encoder=encoder, samples=[encoder.encode(one) for one in chats()])


def namespace(page: str, rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the names that a page's code may use without defining them; called on every rank, in the folder of files."""
    from transformers import TrainingArguments

    # The processes of run_ranks are daemons, which may not start the workers of a loader.
    multiprocessing.current_process()._config["daemon"] = False
    os.environ["ACCELERATE_USE_CPU"] = "true"  # otherwise it sees no other ranks here
    _shorten(TrainingArguments)
    names = shared()
    model, processor, samples = names["model"], names["processor"], [dict(sample) for sample in names["samples"]]
    for sample in samples:
        del sample["mask_strategy"]  # declared by the encoder's adapter only
    names |= dict(
        torch=torch, dist=dist, DistributedDataParallel=DistributedDataParallel, DataLoader=DataLoader, rank=rank,
        num_ranks=num_ranks, num_epochs=2, device=torch.device("cpu"),
        tokenizer=processor.tokenizer, adapter=adapter_for(model.config),
        samples=samples[rank::num_ranks], dataset=samples, DistributedSampler=DistributedSampler, rows=rows(),
        SampleEncoder=SampleEncoder, adapter_for=adapter_for,
        prepare_model=prepare_model, pack_samples=pack_samples, PackingScheduler=PackingScheduler, ProcessGroups=ProcessGroups,
        SchedulerConfig=SchedulerConfig, CostModel=CostModel, optimizer=CountingSGD(model.parameters(), lr=0.01),
        config=SchedulerConfig(max_tokens=1024, samples_per_step=8), example=chats()[1],
        loader=DataLoader(samples, batch_size=None, sampler=DistributedSampler(samples, num_ranks, rank)),
        __name__="page", stack=contextlib.ExitStack(),
    )  # fmt: skip
    return names | PREPARE.get(page, lambda names: {})(names)


def _shorten(arguments: type) -> None:
    """Let the Trainer run a few steps on the CPU, however many a page asks for."""
    original = arguments.__post_init__

    def on_cpu(self: Any) -> None:
        self.use_cpu, self.max_steps, self.report_to, self.disable_tqdm = True, MAX_STEPS, [], True
        self.per_device_train_batch_size, self.dataloader_pin_memory, self.save_strategy = 4, False, "no"
        original(self)

    arguments.__post_init__ = on_cpu


def for_trainer(names: dict[str, Any]) -> dict[str, Any]:
    """Samples for the first block, conversations for the second, tables of text and of conversations for TRL."""
    import datasets

    texts = [{"prompt": row["question"], "completion": row["answer"]} for row in rows()]
    found = chats()
    for chat in found:  # a column of a table has one type
        answer = chat["messages"][1]
        answer["content"] = [{"type": "text", "text": answer["content"]}]
    tables = {"dataset": datasets.Dataset.from_list(texts), "conversations": datasets.Dataset.from_list(found)}
    return {"samples": names["samples"] * 2, "rows": chats(), **tables}


def for_datasets(names: dict[str, Any]) -> dict[str, Any]:
    """Tables, streams and an Energon dataset of the same conversations."""
    import json

    import datasets
    from megatron import energon
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    root = Path("energon").absolute()
    root.mkdir()
    with tarfile.open(root / "shard.tar", "w") as tar:
        for one in chats():
            one = copy.deepcopy(one)
            parts = [part for message in one["messages"][:1] for part in message["content"] if part["type"] == "image"]
            media = {f"{at}.png": Path(part.pop("path")).read_bytes() for at, part in enumerate(parts)}
            for name, data in {"json": json.dumps({"messages": one["messages"]}).encode(), **media}.items():
                info = tarfile.TarInfo(f"{one['sample_id']:03d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    ratio = [("train", 1.0)]
    WebdatasetPreparator.prepare_dataset(root, ["shard.tar"], split_parts_ratio=ratio, tar_index_only=False, workers=1)
    (root / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    lines = [{"messages": json.dumps(one["messages"]), "sample_id": one["sample_id"]} for one in chats()]
    table = datasets.Dataset.from_list(lines)
    return dict(
        table=table, dataset=table.to_iterable_dataset(), path=root, get_train_dataset=energon.get_train_dataset,
        get_savable_loader=energon.get_savable_loader,
        worker_config=energon.WorkerConfig(rank=names["rank"], world_size=names["num_ranks"], num_workers=0),
    )  # fmt: skip


def for_megatron(names: dict[str, Any]) -> dict[str, Any]:
    """A small decoder of Megatron-Core, its config, and an iterator of samples on the ranks that read."""
    from types import SimpleNamespace

    import msgspec
    from megatron.core import parallel_state
    from on_cpu import megatron_on_cpu
    from tiny_gpt import gpt_config
    from tiny_vlm import ADAPTER, VisionGPT, samples
    from training import share, wrapped

    from evenpack.models.registry import FAMILIES

    # The page names the family, whose ids are those of the released checkpoint: here they are the tiny model's.
    FAMILIES["qwen2_vl"] = msgspec.structs.replace(FAMILIES["qwen2_vl"], adapter=ADAPTER)
    parallel_state.initialize_model_parallel()
    names["stack"].enter_context(megatron_on_cpu())
    config = gpt_config(torch.float32, num_layers=2, mrope_section=[1, 1, 2])
    items = share(samples(64), 16, names["rank"], names["num_ranks"])
    return dict(
        config=config, model=wrapped(VisionGPT(config)), train_data_iterator=items, get_num_microbatches=lambda: 8,
        args=SimpleNamespace(seq_length=64), resumed_data_iterator=share(samples(64), 16, names["rank"], names["num_ranks"]),
    )  # fmt: skip


#: Pages whose code one process runs; others run on all ranks.
SINGLE = ("docs/datasets.md",)
PREPARE = {
    "docs/trainer.md": for_trainer,
    "docs/datasets.md": for_datasets,
    "docs/megatron.md": for_megatron,
}
