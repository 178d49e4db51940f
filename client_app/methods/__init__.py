"""One method, one file: what a hospital does with its messages.

It uses the lab and all below it, and is found by the table in models/contract/methods.py.
"""
