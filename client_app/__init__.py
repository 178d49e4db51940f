"""What a hospital does with a message: the Flower ClientApp and one module per method.

``app`` is loaded by Flower; the methods and torch are imported by the first message that needs
them, because in deployment each message starts a new process.
"""

from fedsilo.client_app.app import app

__all__ = ["app"]
