"""The round: asking, checks, failures, resuming. It knows no method.

Stands on meeting and wire.
"""
