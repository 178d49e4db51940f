"""What is measured of predictions and data: metrics, intervals, calibration, drift and novelty.

Imports the contract and ``maths``, no network and no method.
"""
