"""The hospital's side: the Flower ClientApp that answers messages, and one module per method.

Flower loads ``app``. The methods and torch are imported only by a message that needs them, because
in a deployment each message starts a new process.
"""

from fedsilo.client_app.app import app

__all__ = ["app"]
