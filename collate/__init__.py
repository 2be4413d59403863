"""From samples to packs: THD packing, positions, masks, media, context-parallel shards."""

if __name__ != "evenpack.collate":
    raise ImportError("import this folder as evenpack.collate: under its bare name a second copy of every class would appear")

from .encoding.encoder import SampleEncoder
from .encoding.processors import load_processor
from .encoding.settings import EncoderConfig
from .isolation import verify_isolation
from .packs.alignment import pack_alignment
from .packs.batch import PackedBatch
from .packs.pack import pack_samples
from .packs.row import Boundaries
from .packs.shard import cp_slots
from .samples.group import fold_group
from .samples.prepare import prepare_sample
from .samples.truncate import truncate_sample

__all__ = [
    "Boundaries",
    "EncoderConfig",
    "PackedBatch",
    "SampleEncoder",
    "cp_slots",
    "fold_group",
    "load_processor",
    "pack_alignment",
    "pack_samples",
    "prepare_sample",
    "truncate_sample",
    "verify_isolation",
]
