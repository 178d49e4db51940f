"""Made-up twins of the real data sets: no patient is in them.

Nothing below imports it; the registry names its data sets by text.
"""
