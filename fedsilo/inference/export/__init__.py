"""Exports a finished run's model in formats that other programs read, with a model card."""
