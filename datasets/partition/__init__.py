"""How pools of labelled images become silos.

Stands on io, silo and the kinds of data.
"""
