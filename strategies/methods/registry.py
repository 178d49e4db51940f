"""The server's side of each method of the table in ``fedsilo.models.contract.methods``."""

from fedsilo.models.contract.methods import server_class
from fedsilo.strategies.loop.method import Method


def strategy_class(name: str) -> type[Method]:
    """Return the server's class of method ``name``."""
    method: type[Method] = server_class(name)
    return method
