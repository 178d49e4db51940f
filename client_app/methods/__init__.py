"""One method, one file: what a hospital does with its messages.

Stands on all folders beside it; opening and app stand on it.
"""
