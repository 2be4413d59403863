"""A model set up for packs: prepared, checked, unwrapped, probed."""
