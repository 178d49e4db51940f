"""The one way out: clipping, noise and the ledger.

Stands on site; knows no method.
"""
