"""Look up the server's side of a method in the table ``fedsilo.core.methods``."""

from fedsilo.core.methods import server_class
from fedsilo.strategies.loop.method import Method


def strategy_class(name: str) -> type[Method]:
    """Return the class that implements the server's side of the method ``name``.

    The method is built-in or a plugin's.

    Raises:
        SettingError: no method has that name, or its class is missing or abstract.
    """
    method: type[Method] = server_class(name)
    return method
