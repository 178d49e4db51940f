"""Fine-tunes a finished run's model for a new task.

Imports run, compare and pictures of this room.
"""
