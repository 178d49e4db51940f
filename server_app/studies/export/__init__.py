"""Export a finished run's model in forms that other programs read, with its model card.

It imports predict and records.
"""
