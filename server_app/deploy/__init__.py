"""The processes of a deployment.

It imports run.
"""
