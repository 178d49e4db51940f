"""Watches runs: live in a terminal, or as pages in a browser.

It only reads files, so a run is not affected.
"""
