"""The interface of an explanation of one sample, whatever the method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Explanation(Protocol):
    """Why a model answered as it did for one sample; it never leaves the hospital."""

    def lines(self) -> list[str]:
        """Return it as text."""
        ...

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        ...

    def figure(self) -> Figure:
        """Draw it."""
        ...
