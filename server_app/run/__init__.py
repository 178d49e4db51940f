"""One run on one engine: inline, or Ray.

Stands on config, records and figures.
"""
