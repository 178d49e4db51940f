"""Measurements of predictions and data: metrics, intervals, calibration, drift and novelty."""
