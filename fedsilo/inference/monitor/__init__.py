"""``fedsilo monitor``: checks whether new cases still resemble a model's training data.

Imports predict, report and records of this room. It runs where the data are and sends nothing.
"""
