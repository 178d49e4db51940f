"""The command line: it only reads options and calls a typed function for each command.

Stands on everything; nothing imports it.
"""
