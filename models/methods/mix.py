"""Mix, an oracle: one model of all silos' training data."""

from __future__ import annotations

from dataclasses import dataclass

from models.contract.settings import NoSettings


@dataclass(frozen=True)
class MixSettings(NoSettings):
    """None of its own."""
