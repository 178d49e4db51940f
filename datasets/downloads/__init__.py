"""Public data sets: where they come from, and downloads with checksums."""
