"""Bytes at rest: files that are complete or absent, downloads with checksums.

Knows no data set.
"""
