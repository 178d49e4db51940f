"""A method's own pictures, of its JSON documents.

Knows no run.
"""
