"""What a run writes and how it is read again.

Stands on config.
"""
