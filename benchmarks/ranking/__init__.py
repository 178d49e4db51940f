"""``python -m benchmarks.ranking``: every method on several settings, and a page of the results."""
