"""The ledger, told counts, and secure sums.

Stands on site; knows no method.
"""
