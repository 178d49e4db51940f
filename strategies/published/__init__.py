"""The papers' numbers, and the setting in which each was measured.

Stands on the contract.
"""
