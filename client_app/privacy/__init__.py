"""The ledger, told counts, measurements under a cap, and secure sums.

Stands on site; knows no method.
"""
