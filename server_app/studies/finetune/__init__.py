"""Train a finished run's model on a task of its own.

It imports run, compare and figures.
"""
