"""What both ends of the wire must agree on: messages, settings, errors, seeds, versions.

Imports nothing of the project but itself; what needs torch imports it where it is used.
"""
