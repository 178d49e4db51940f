"""``fedsilo benchmark``: every method on several settings, and the page of its results.

Stands on ``compare``; nothing but ``studies.api`` imports it.
"""
