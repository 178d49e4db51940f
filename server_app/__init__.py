"""The server: the Flower ServerApp (``app.py``), the course of a run, and its files."""
