"""Pages that people read: a report of finished runs, for three readers.

Stands on compare, pictures, records and config. A page is one file: no script, nothing from the
network, the same bytes for the same run.
"""
