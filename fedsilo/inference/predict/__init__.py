"""Uses a finished run's model: predicts new cases, and calibrates the predictions.

It runs where the data are and sends nothing.
"""
