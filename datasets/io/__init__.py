"""Bytes at rest: files that are complete or absent, downloads with checksums.

Knows no data set but by the table of public ones, ``datasets/public.yaml``.
"""
