"""Compares many runs in one table, tunes settings, and cross-validates."""
