"""A message from the server, as a site's methods see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedsilo.models.contract.messages import ARRAYS, Instruction
from fedsilo.strategies.wire.records import unpack


@dataclass(frozen=True)
class OwnCap:
    """A hospital's own cap: what all its runs together may tell, whatever servers ask.

    Attributes:
        ledger: counts the noisy messages of all runs, by their noise multiplier.
        most: the cap on epsilon.
        delta: at which it holds.
    """

    ledger: Path
    most: float
    delta: float


@dataclass(frozen=True)
class Request:
    """A message from the server: its instruction and its records."""

    instruction: Instruction
    content: RecordDict
    simulated: bool = False  # by the site's own node config, whatever the server says
    own_cap: OwnCap | None = None  # the hospital's, if its node config has one

    def arrays(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the arrays that came whose names begin so, without the prefix; maybe none."""
        if ARRAYS not in self.content.array_records:
            return {}
        record = self.content.array_records[ARRAYS]
        return {
            name.removeprefix(prefix): torch.from_numpy(unpack(array))
            for name, array in record.items()
            if name.startswith(prefix)
        }
