"""The privacy ledger, reported counts, and secure sums.

Imports the folder site; knows no method.
"""
