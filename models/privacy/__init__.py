"""Clip, noise, account.

Stands on the contract; knows no network and no method.
"""
