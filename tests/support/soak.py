"""What `make test` leaves to `make test-soak`: more of the same, at other places."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_soak(values: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Return a test's parameters, marked ``soak`` all but those in every suite.

    Args:
        values: one for each test, a tuple where a test takes several.
        but: the values that `make test` tries too.
    """
    return [value if value in but else _marked(value) for value in values]


def _marked(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.soak)
