"""What a method tells of itself and of a run, beside the figures that all methods have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.strategies.loop.state import RoundState


class Disclosures:
    """What a method makes leave each site, in words, for ``privacy.json``.

    Attributes:
        leaves: a sentence for each kind of record.
        noise: noise of the method's own that is no differential privacy; empty: none.
    """

    def __init__(self, *leaves: str, noise: str = "") -> None:
        self.leaves = leaves
        self.noise = noise


class MethodReport:
    """Tells nothing; a method overrides what it has to tell."""

    def disclosures(self) -> Disclosures:
        """Return what this method makes leave each site."""
        return Disclosures()

    def documents(
        self, state: RoundState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return what else a run writes at its end: file name -> content for JSON.

        Args:
            state: the last round's.
            values: the final test figures, site -> metric -> value.
        """
        return {}

    @classmethod
    def marks(cls, state: RoundState) -> dict[int, str]:
        """Return what happened in which round, for the round's line and the learning curves."""
        return {}
