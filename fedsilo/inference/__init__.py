"""Uses a finished run's model on new cases: predicts, monitors, exports.

It runs where the data are and sends nothing.
"""
