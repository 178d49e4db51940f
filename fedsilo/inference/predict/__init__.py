"""Uses a finished run's model: predicts new cases, and calibrates the predictions.

Imports finetune, pictures and records of this room. It runs where the data are and sends nothing.
"""
