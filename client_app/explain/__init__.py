"""Explanations of a model's answers, shown at the hospital.

Imports training, and no method but those whose parts it explains.
"""
