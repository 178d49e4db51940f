"""Watch a run: live in a terminal, or as a page on the loopback.

It imports report, deploy, run and records. It only reads files, so the run is not affected.
"""
