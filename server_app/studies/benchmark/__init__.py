"""``fedsilo benchmark``: every method on several settings, and the page of what came out.

Stands on ``compare``; nothing but ``studies.api`` imports it.
"""
