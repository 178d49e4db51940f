"""A finished run's model in forms that others read, and the card that goes with it.

Stands on predict and records.
"""
