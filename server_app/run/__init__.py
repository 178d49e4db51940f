"""One run on one engine: inline, or Ray.

Stands on config and records.
"""
