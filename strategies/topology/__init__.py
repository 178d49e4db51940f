"""Topologies: neighbours, mixing weights and the time of a round.

Imports only the types of the loop.
"""
