"""Explanations of a model's predictions, shown only at the hospital.

Imports the folder training, and the methods whose parts it explains.
"""
