"""Mix, an oracle: one model of all silos' training data."""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.notes import Notes
from fedsilo.models.contract.settings import NoSettings


@dataclass(frozen=True)
class MixSettings(NoSettings):
    """None of its own."""


@dataclass(frozen=True)
class PoolNotes(Notes):
    """The sites whose training data the oracle pools."""

    sites: tuple[str, ...]
