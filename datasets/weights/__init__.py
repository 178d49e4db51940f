"""Pretrained weights at rest, and what they have seen.

Stands on the registry of data sets.
"""
