"""The round loop, the same for all methods: ask sites, check replies, handle failures, resume.

Imports only the folders meeting and wire of this room.
"""
