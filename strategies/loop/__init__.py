"""The round: messages, checks, failures, going on. It knows no method.

Stands on wire.
"""
