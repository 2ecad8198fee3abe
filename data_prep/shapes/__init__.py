"""One file a source shape: raw rows to canonical problems."""
