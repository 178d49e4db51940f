"""The privacy ledger, the reported counts, and secret sums.

This folder imports the folder site, and knows no method.
"""
