"""Finished runs, read again from their directories."""
