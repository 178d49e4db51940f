"""Bytes at rest: files that are whole or absent, downloads with checksums.

Knows no data set.
"""
