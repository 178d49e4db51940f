"""The server: the Flower ServerApp (``app.py``), run directories, studies, API and command line.

Nothing is imported here: ``fedsilo experiments`` needs no Flower.
"""
