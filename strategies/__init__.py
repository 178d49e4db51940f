"""What is sent, to whom, and how replies are combined: the server's side of each method.

``from fedsilo.strategies import UEFL`` gives the method as a Flower Strategy, for a ServerApp of
one's own; the names are those of the table in ``models/contract/methods.py``.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the Flower strategy of the class ``name``; it is imported when it is first asked for.

    Raises:
        AttributeError: no method has a class of that name.
    """
    from fedsilo.models.contract.methods import METHODS, class_name

    method = next((method for method in METHODS if class_name(method) == name), None)
    if method is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from fedsilo.strategies.flower import flower_strategy

    return flower_strategy(method)
