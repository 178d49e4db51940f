"""The course of a run at the server: checks, beginning, rounds, end.

Imports only config and records of this room. It draws nothing: whoever started the run does.
"""
