"""Look up the server's side of a method in the table ``fedsilo.core.methods``."""

from fedsilo.core.methods import server_class
from fedsilo.strategies.loop.method import Method


def strategy_class(name: str) -> type[Method]:
    """Return the class of method ``name`` for the server."""
    method: type[Method] = server_class(name)
    return method
