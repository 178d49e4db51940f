"""Draws pictures of finished runs.

Imports config and records of this room.
"""
