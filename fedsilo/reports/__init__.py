"""Pages that people read: a report of finished runs, for three readers.

A page is one file without scripts. It loads nothing from the network, and the same run gives the
same bytes.
"""
