"""What a method tells of itself and of a run, beside the figures that all methods have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedsilo.strategies.loop.state import RoundState

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Published(dict[str, dict[str, float]]):
    """A paper's test numbers beside a run: distribution or site -> metric -> value.

    Attributes:
        unlike: of an empty one, in what the run differs from where the paper measured; empty: the
            paper has nothing on the run's data.
    """

    def __init__(
        self, figures: Mapping[str, dict[str, float]] | None = None, unlike: str = ""
    ) -> None:
        super().__init__(figures or {})
        self.unlike = unlike


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

    def published(self) -> Published:
        """Return a paper's test numbers for this very setting, or why there are none."""
        return Published()

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
    def pictures(cls, documents: Mapping[str, Any]) -> dict[str, Figure]:
        """Return pictures of what ``documents`` gave: file name -> figure."""
        return {}

    @classmethod
    def marks(cls, state: RoundState) -> dict[int, str]:
        """Return what happened in which round, for the round's line and the learning curves."""
        return {}
