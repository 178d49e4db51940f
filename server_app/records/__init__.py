"""The files of a run: writing them, and reading them again.

Imports only config of this room.
"""
