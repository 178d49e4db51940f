"""The functions of the commands; ``import fedsilo`` offers them.

Up to version 0.1 Python imported them from here. That still works for one version, with a warning
that names the new import.
"""

_MODULES = ("checking", "deploying", "hospital", "privacy")


def __getattr__(name: str) -> object:
    """Import a name that version 0.1 had here, and warn.

    Raises:
        AttributeError: there was no such name; for a removed command the message names its
            replacement.
    """
    from importlib import import_module
    from warnings import warn

    from fedsilo.api import table

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    new = table.RENAMED.get(name, name)
    found = table.find_public(new)
    text = f"'from {__name__} import {name}' ends with the next version"
    warn(f"{text}: write 'from fedsilo import {new}'", DeprecationWarning, stacklevel=2)
    return found
