"""One method, one file: what is sent, to whom, and how replies are combined.

It imports all other folders of this room.
"""
