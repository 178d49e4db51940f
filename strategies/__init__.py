"""The server's side of each method: messages, the sites asked, and how replies are combined.

``from fedsilo.strategies import UEFL`` gives the method as a Flower Strategy, for use in your own
ServerApp. The names are those of the table in ``fedsilo/core/methods.py``.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the Flower strategy with the class name ``name``, imported at its first use.

    Raises:
        AttributeError: no method has a class of that name.
    """
    from fedsilo.core.methods import METHODS, class_name

    for method in METHODS:
        if class_name(method) == name:
            from fedsilo.strategies.flower import flower_strategy

            return flower_strategy(method)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
