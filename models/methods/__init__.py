"""One paper, one file: its equations, its settings, and where each equation is computed.

Imports all other folders of models; one method may use another's mathematics.
"""
