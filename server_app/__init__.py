"""The Flower ServerApp: config, rounds, run directory, checkpoints, and the command line."""

from fedsilo.server_app.app import app

__all__ = ["app"]
