"""Arrays on the wire: all of strategies that hospitals import.

Stands on models.contract only.
"""
