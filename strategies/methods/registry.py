"""The server's side of each method of the table in ``models.contract.methods``."""

from __future__ import annotations

from models.contract.methods import method_part
from strategies.loop.method import Method


def strategy_class(name: str) -> type[Method]:
    """Return the server's class of method ``name``."""
    method: type[Method] = method_part("strategies", name)
    return method
