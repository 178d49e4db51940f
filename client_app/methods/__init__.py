"""The hospital's side of each method, one file per method.

This folder imports the lab and everything below it. The table in fedsilo/core/methods.py finds the
classes.
"""
