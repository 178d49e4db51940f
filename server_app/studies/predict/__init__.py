"""Use a finished run's model: predict new cases, and calibrate the predictions.

It imports finetune, figures and records; it runs where the data are and sends nothing.
"""
