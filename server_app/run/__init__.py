"""One run on one engine: inline, processes, or Ray.

Stands on config and records.
"""
