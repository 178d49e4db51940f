"""``fedsilo monitor``: whether new cases are still like those that a model was trained on.

It imports predict, report and records; it runs where the data are and sends nothing.
"""
