"""A run watched while it goes on: live in a terminal, or as a page on the loopback.

Stands on report, deploy, run and records. It reads files and nothing else: no run notices it.
"""
