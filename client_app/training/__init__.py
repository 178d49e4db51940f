"""Local optimisation and measuring, the same for every method.

Stands on site; knows no method.
"""
