"""Pictures of finished runs.

Stands on config and records.
"""
