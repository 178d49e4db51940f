"""Explanations of a model's predictions, shown only at the hospital."""
