"""The ledger, reported counts, and secure sums.

Stands on site; knows no method.
"""
