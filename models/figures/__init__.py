"""What the pictures of all rooms have in common: one palette, one heat map.

Stands on nothing of ours; matplotlib is only imported by what draws.
"""
