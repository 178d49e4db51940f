"""Arrays on the wire: the only folder of this room that hospitals import.

Imports fedsilo.core and the arithmetic of models.maths.compression.
"""
