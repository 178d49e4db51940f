"""A message from the server, as a site's methods see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from flwr.app import RecordDict
from torch import Tensor

from models.contract.messages import ARRAYS, Instruction

if TYPE_CHECKING:
    from client_app.privacy.protection import OwnCap


@dataclass(frozen=True)
class Request:
    """A message from the server: its instruction and its records."""

    instruction: Instruction
    content: RecordDict
    simulated: bool = False  # by the site's own node config, whatever the server says
    own_cap: OwnCap | None = None  # the hospital's, if its node config has one

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays that came, by name; empty if none came."""
        if ARRAYS not in self.content.array_records:
            return {}
        record = self.content.array_records[ARRAYS]
        # from_numpy shares memory with the message; the copy keeps the message as it came
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
