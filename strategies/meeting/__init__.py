"""Find out which sites take part: ask who they are, read their hellos, admit or refuse them.

Imports only the folder wire of this room.
"""
