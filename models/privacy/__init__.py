"""Differential privacy and secure sums: clip, noise, account, mask."""
