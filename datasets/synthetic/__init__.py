"""Synthetic counterparts of the real data sets; they contain no patient's data."""
