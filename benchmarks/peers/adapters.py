"""How each released package's own functions are called; runs inside the environment of `environment.py`.

Every function takes a `Task` and returns packs of sample indices per rank. Packages that pack without a word about ranks
have their packs dealt out in turn, as a distributed sampler deals rows. Glue is ours, decisions are theirs.
"""

import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Pack = list[int]


class Task(NamedTuple):
    """One step's samples.

    Attributes:
        lengths: tokens of each sample.
        home: rank that read it.
        num_ranks: R.
        capacity: most tokens of a pack.
    """

    lengths: list[int]
    home: list[int]
    num_ranks: int
    capacity: int


def load(package: str, path: str, stubs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Run one file of an installed package as a module, without importing the package around it.

    Args:
        package: its name in the registry.
        path: the file inside the package.
        stubs: modules that the file imports and the functions used here do not need, with the names they must have.
    """
    file = next(file for file in importlib.metadata.files(package) or [] if str(file) == path)
    for name, members in stubs.items():
        stub = types.ModuleType(name)
        stub.__dict__.update(members, __path__=[])
        sys.modules[name] = stub
    spec = importlib.util.spec_from_file_location(path.replace("/", ".").removesuffix(".py"), str(file.locate()))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def dealt(packs: list[Pack], num_ranks: int) -> list[list[Pack]]:
    """Deal packs to the ranks in turn."""
    return [packs[rank::num_ranks] for rank in range(num_ranks)]


def quiet_logger(*_: object, **__: object) -> Any:
    """Return a logger that says nothing."""
    logger = logging.getLogger("peers")
    logger.setLevel(logging.CRITICAL)
    return logger


def load_verl() -> Any:
    """Return verl's `seqlen_balancing`."""
    stubs = {
        "verl": {},
        "verl.protocol": {"DataProto": object},
        "verl.utils": {"tensordict_utils": types.SimpleNamespace(index_select_tensor_dict=lambda batch, rows: rows)},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
    }
    return load("verl", "verl/utils/seqlen_balancing.py", stubs)


def verl() -> Callable[[Task], list[list[Pack]]]:
    """Equal counts per rank as its trainer balances a batch, then its micro-batches, the same number on all ranks."""
    import torch

    module = load_verl()

    def run(task: Task) -> list[list[Pack]]:
        workload = module.calculate_workload(torch.tensor(task.lengths)).tolist()
        groups = module.get_seqlen_balanced_partitions(workload, task.num_ranks, equal_size=True)
        parts = [[torch.zeros(task.lengths[i], dtype=torch.bool) for i in group] for group in groups]
        batches = [{"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)} for rows in parts]
        count = 1
        while True:  # what its all-reduce over the group does: more micro-batches until all ranks fit
            split = [module.rearrange_micro_batches(batch, task.capacity, min_num_micro_batch=count)[1] for batch in batches]
            if max(len(packs) for packs in split) == min(len(packs) for packs in split):
                return [[[group[j] for j in pack] for pack in packs] for group, packs in zip(groups, split, strict=True)]
            count = max(len(packs) for packs in split)

    return run


def trl() -> Callable[[Task], list[list[Pack]]]:
    """Best fit decreasing of the packing strategy "bfd"."""
    import pyarrow

    nothing = {"Dataset": type("Dataset", (), {}), "DatasetDict": type("DatasetDict", (), {})}
    nothing |= {"IterableDataset": type("Iterable", (), {}), "IterableDatasetDict": type("IterableDict", (), {})}
    stubs = {"datasets": nothing, "transformers": {"PreTrainedTokenizerBase": object, "ProcessorMixin": object}}
    module = load("trl", "trl/data_utils.py", stubs)

    def run(task: Task) -> list[list[Pack]]:
        # Every token of a sample carries the sample's number, which the packed rows then show.
        rows = pyarrow.array([np.full(length, i) for i, length in enumerate(task.lengths)], pyarrow.list_(pyarrow.int64()))
        packed = module._pack_bfd(pyarrow.table({"input_ids": rows}), task.capacity)
        packs = [list(dict.fromkeys(row.tolist())) for row in packed["input_ids"].to_numpy()]
        return dealt(packs, task.num_ranks)

    return run


def axolotl() -> Callable[[Task], list[list[Pack]]]:
    """The multipack sampler's groups: first fit in the sampler's order."""
    stubs = {
        "axolotl": {},
        "axolotl.utils": {},
        "axolotl.utils.distributed": {"reduce_and_broadcast": None},
        "axolotl.utils.logging": {"get_logger": quiet_logger},
    }
    module = load("axolotl", "axolotl/utils/samplers/multipack.py", stubs)
    module.pack_group(np.array([1, 2], np.int32), 0, 4, 2, 4, True)  # compile it outside of the timing

    def run(task: Task) -> list[list[Pack]]:
        sampler = module.MultipackBatchSampler(
            range(len(task.lengths)), batch_size=1, batch_max_len=task.capacity, lengths=np.array(task.lengths),
            bin_size=task.capacity, drop_last=False, num_processes=1,
        )  # fmt: skip
        packs = [[int(index) for index in pack] for batch in sampler.generate_batches() for pack in batch]
        return dealt(packs, task.num_ranks)

    return run


def load_swift() -> Any:
    """Return ms-swift's `packing`."""
    names = ("get_external_files", "import_external_file", "is_dist", "is_master", "split_list")
    utils = {"get_logger": quiet_logger, **dict.fromkeys(names)}
    stubs = {"swift": {}, "swift.template": {"MaxLengthError": ValueError}, "swift.utils": utils}
    return load("ms-swift", "swift/dataset/packing.py", stubs)


def swift(strategy: str) -> Callable[[], Callable[[Task], list[list[Pack]]]]:
    """Its chunks of 1,000 samples, each packed by the package binpacking, or in order."""

    def make() -> Callable[[Task], list[list[Pack]]]:
        module = load_swift()

        def run(task: Task) -> list[list[Pack]]:
            packs, waiting = [], []
            size = module.PackingDataset.PACKING_BATCH_SIZE
            samples = list(enumerate(task.lengths))
            for start in range(0, len(samples), size):
                waiting += samples[start : start + size]
                last = start + size >= len(samples)
                done, waiting = module.calculate_matched_group(waiting, task.capacity, is_finished=last, strategy=strategy)
                packs += [[index for index, _ in pack] for pack in done]
            return dealt(packs, task.num_ranks)

        return run

    return make


def llamafactory() -> Callable[[Task], list[list[Pack]]]:
    """Greedy knapsack by lengths; samples of one length are taken from the last."""
    module = load("llamafactory", "llamafactory/data/processor/processor_utils.py", {})

    def run(task: Task) -> list[list[Pack]]:
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(task.lengths):
            by_length[length].append(index)
        packs = module.greedy_knapsack(list(task.lengths), task.capacity)
        return dealt([[by_length[length].pop() for length in pack] for pack in packs], task.num_ranks)

    return run


def automodel() -> Callable[[Task], list[list[Pack]]]:
    """Neat packing: longest first into the emptiest pack."""
    path = "nemo_automodel/components/datasets/llm/neat_packing.py"
    module = load("nemo-automodel", path, {"datasets": {"Dataset": object}})
    return lambda task: dealt(module.greedy_knapsack(task.lengths, task.capacity), task.num_ranks)


def veomni() -> Callable[[Task], list[list[Pack]]]:
    """Every rank scans its own buffer, which holds all samples that it read."""
    stubs = {"veomni": {}, "veomni.utils": {"logging": types.SimpleNamespace(get_logger=quiet_logger)}, "veomni.data": {}}
    source = load("veomni", "veomni/data/dynamic_batching.py", stubs)

    def run(task: Task) -> list[list[Pack]]:
        ranks = []
        for rank in range(task.num_ranks):
            buffer = source.DynBszBuffer(get_length_fn=lambda index: task.lengths[index])
            for index, home in enumerate(task.home):
                if home == rank:
                    buffer.append(index)
            packs = []
            while len(buffer):
                packs.append(buffer.get_samples(task.capacity))
                buffer.flush()
            ranks.append(packs)
        return ranks

    return run


def bridge() -> Callable[[Task], list[list[Pack]]]:
    """First fit decreasing by lengths."""
    module = load("megatron-bridge", "megatron/bridge/data/datasets/packing_utils.py", {})

    def run(task: Task) -> list[list[Pack]]:
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(task.lengths):
            by_length[length].append(index)
        packs = module.first_fit_decreasing(task.lengths, task.capacity)
        return dealt([[by_length[length].pop() for length in pack] for pack in packs], task.num_ranks)

    return run


def megatron_core() -> Callable[[Task], list[list[Pack]]]:
    """Look for the DP-balanced packing scheduler, which is on the development branch."""
    files = [file.locate() for file in importlib.metadata.files("megatron-core") or [] if str(file).endswith(".py")]
    if not any("DpBalanced" in Path(str(file)).read_text(encoding="utf-8") for file in files):
        raise LookupError("the release has no DP-balanced packing scheduler (its development branch has)")
    raise LookupError("the release has a DP-balanced packing scheduler, and this benchmark no adapter for it yet")


#: Row of the table: package, what of it runs, and how to get the function.
PEERS: dict[str, tuple[str, str, Callable[[], Callable[[Task], list[list[Pack]]]]]] = {
    "verl": ("verl", "Karmarkar-Karp, equal counts, then micro-batches", verl),
    "trl": ("trl", "best fit decreasing", trl),
    "axolotl": ("axolotl", "first fit in order", axolotl),
    "swift": ("ms-swift", "binpacking: emptiest pack that fits", swift("binpack")),
    "swift-in-order": ("ms-swift", "next-fit in order", swift("sequential")),
    "llamafactory": ("llamafactory", "greedy knapsack", llamafactory),
    "automodel": ("nemo-automodel", "neat packing", automodel),
    "veomni": ("veomni", "each rank's own buffer", veomni),
    "bridge": ("megatron-bridge", "first fit decreasing", bridge),
    "megatron-core": ("megatron-core", "next-fit over the group", megatron_core),
}
