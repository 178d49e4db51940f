"""Watches a run: live in a terminal, or as a page on the loopback.

It only reads files, so the run is not affected.
"""
