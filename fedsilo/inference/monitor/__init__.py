"""``fedsilo monitor``: checks whether new cases still resemble a model's training data.

It runs where the data are and sends nothing.
"""
