"""Arrays on the wire: all of strategies that hospitals import.

Stands on models.contract and the arithmetic of models.maths.compression.
"""
