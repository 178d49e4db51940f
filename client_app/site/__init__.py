"""A hospital's identity and its rules: site file, limits, audit log and private state.

This folder knows no method.
"""
