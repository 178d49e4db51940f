"""Local optimisation and measuring, the same for every method.

Imports the folder site; knows no method.
"""
