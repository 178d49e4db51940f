"""Many runs, one table.

Stands on run.
"""
