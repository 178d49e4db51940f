"""Checks of a site, of a server and of a run: what would make a run fail, found before it starts.

It imports deploy and run.
"""
