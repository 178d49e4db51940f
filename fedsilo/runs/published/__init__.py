"""The papers' numbers, as data, each with the setting it was measured in.

They are looked up whenever a finished run is read: the server and the hospitals know none of them.
"""
