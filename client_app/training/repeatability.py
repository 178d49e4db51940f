"""Operations that have no deterministic form: named, or refused, as 'deterministic' says.

PyTorch knows which they are and says so as it meets one, by a warning or an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedsilo.models.contract.errors import SiteError

_SAID = re.compile(r"(\S+) does not have a deterministic implementation")
_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


@contextmanager
def noted_operations() -> Iterator[set[str]]:
    """Collect the names of the operations that PyTorch warns of; other warnings pass.

    Raises:
        SiteError: one is refused, since 'deterministic' is 'true'.
    """
    found: set[str] = set()
    pass_on = warnings.showwarning

    def note(message: Warning | str, *where: Any, **more: Any) -> None:
        if operation := _operation(str(message)):
            found.add(operation)
        else:
            pass_on(message, *where, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=r"\S+ does not have a deterministic")
        warnings.showwarning = note
        try:
            yield found
        except RuntimeError as error:
            if operation := _operation(str(error)):
                raise SiteError(
                    f"'{operation}' has no deterministic form on this device and 'deterministic' "
                    "is 'true': set it to 'warn', which names such operations in summary.json"
                ) from None
            raise


def _operation(text: str) -> str:
    match = _SAID.match(text)
    return _PLAIN.sub("-", match[1]).lstrip("-")[:100] if match else ""
