"""One method, one file: what is sent, to whom, and how replies are combined.

Stands on all folders beside it.
"""
