"""The hospital's side: the Flower ClientApp (``app.py``), and one module per method.

The first message that needs them imports the methods and torch, because in a deployment each
message starts a new process. This file imports nothing, because commands that only list read
modules of this package, and need no Flower.
"""
