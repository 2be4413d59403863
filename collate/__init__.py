"""From samples to packs: THD packing, positions, masks, media, context-parallel shards."""

if __name__ != "evenpack.collate":
    raise ImportError("import this folder as evenpack.collate: under its bare name a second copy of every class would appear")
