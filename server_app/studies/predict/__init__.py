"""A finished run's model at work: predictions of new cases, and what calibrates them.

Stands on finetune, figures and records; it runs where the data lie and sends nothing.
"""
