"""Compiled loops of the planner: they fill packs, exchange samples between packs, and scan tables for bounds and sums.

All take and return integers, none allocates per sample, all release the GIL. A `bin` is one pack, `rank * M + micro-batch`.
Numba's cache does not notice a changed helper in another module, so functions that call each other share one module.
"""
