"""The place of the functions until version 0.1: an import from here warns and names the new one.

It works for one version. The rooms below know nothing of the functions, so they are found by name.
"""

from importlib import import_module
from warnings import warn

_MODULES = ("checking", "deploying", "hospital", "privacy")


def __getattr__(name: str) -> object:
    """Import a name that version 0.1 had here, and warn.

    Raises:
        AttributeError: there was no such name. For a removed command, the message names the
            command that replaces it.
    """
    if name in _MODULES:
        return import_module(f"fedsilo.api.{name}")
    table = import_module("fedsilo.api.table")
    new = table.RENAMED.get(name, name)
    found: object = table.find_public(new)
    text = f"'from {__name__} import {name}' ends with the next version"
    warn(f"{text}: write 'from fedsilo import {new}'", DeprecationWarning, stacklevel=2)
    return found
