"""A hospital's identity and its rules: policy, limits, audit log, private state.

Knows no method.
"""
