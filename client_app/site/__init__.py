"""Who a hospital is and what it allows: policy, audit log, private state, request.

Knows no method.
"""
