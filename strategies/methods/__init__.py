"""The server's side of each method, one file per method.

It may import all other folders of this room.
"""
