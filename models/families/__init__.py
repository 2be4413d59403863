"""One file per model family: the constants of its released checkpoint, and its paths in a config."""
