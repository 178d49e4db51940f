"""Differential privacy and secure sums: clip, noise, account, mask.

Imports the contract only, no network and no method.
"""
