"""Who a hospital is and what it allows: identity, policy, audit log, private state.

Knows no method.
"""
