"""Networks and the papers' mathematics as pure tensor functions.

Nothing here imports flwr, reads a file or picks a device; the settings that describe a network
or a method live next to it, so both sides of the wire read them the same way.
"""
