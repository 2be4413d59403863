"""One sample: read, checked, trimmed and truncated."""
