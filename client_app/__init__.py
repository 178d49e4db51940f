"""The hospital's side: the Flower ClientApp that answers messages, and one module per method.

Flower loads ``app``. The first message that needs them imports the methods and torch, because in a
deployment each message starts a new process.
"""

from fedsilo.client_app.app import app

__all__ = ["app"]
