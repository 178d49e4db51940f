"""Who sends to whom, how fast, and with which weights.

Stands on the loop's types.
"""
