"""The processes of a deployment.

Stands on run.
"""
