"""One run on one engine: inline, processes, or Ray.

Imports only config and records of this room.
"""
