"""Who a hospital is and what it allows: identity, policy, audit log, private state, request.

Knows no method.
"""
