"""Local training and measuring, the same for every method.

This folder imports the folder site, and knows no method.
"""
