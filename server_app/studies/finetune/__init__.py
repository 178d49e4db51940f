"""A finished model put to a task of one's own.

Stands on run, compare and figures.
"""
