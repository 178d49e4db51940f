"""Each silo alone: no arithmetic between silos."""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.settings import NoSettings


@dataclass(frozen=True)
class LocalSettings(NoSettings):
    """None of its own."""
