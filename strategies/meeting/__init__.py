"""Which sites take part: asking who they are, reading what they say, admitting or refusing them.

Stands on wire.
"""
