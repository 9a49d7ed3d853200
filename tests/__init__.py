"""The tests; they mirror the tree, and `tests.tiny`, `tests.counts` are their shared helpers."""
