"""One pack: segments in a row, its tensors, shards and forward arguments."""
