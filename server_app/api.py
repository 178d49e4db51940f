"""Former home of the API's functions: until version 0.1 they were imported from this module.

Such an import still works for one more version, and warns with the new name. The functions are
looked up by name, because this package must not import ``fedsilo.api``.
"""

from importlib import import_module
from warnings import warn

_MODULES = ("checking", "deploying", "hospital", "privacy")


def __getattr__(name: str) -> object:
    """Return the API's function or module ``name``. A function comes with a DeprecationWarning.

    Raises:
        AttributeError: the API has no such name. For a removed command, the message names the
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
