"""Pages that people read: a report of finished runs, for three readers.

A page is one file: no script, nothing from the network, the same bytes for the same run.
"""
