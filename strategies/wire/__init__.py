"""Arrays on the wire: the only folder of this room that hospitals import.

It imports only fedsilo.core.
"""
