"""Options of the command line, and nothing else: each command calls a typed function.

Stands on everything; nothing imports it.
"""
