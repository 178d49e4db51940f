"""Bytes at rest: files that are complete or absent, downloads with checksums.

The only data sets that it knows are in the table of public ones, ``datasets/public.yaml``.
"""
