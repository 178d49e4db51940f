"""Shared parts of all pictures: one palette, one heat map."""
