"""What every method does at a site: unpack, measure the incoming model, train, measure, reply.

A method says how its network is built from what came, what it keeps at home and what it sends;
the order of steps, the metrics and the private state's timing are the same for all.
"""

from __future__ import annotations

import resource
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from client_app.device import choose_compute
from client_app.evaluation import SiteNetwork, TokenWatch, measure
from client_app.state import SiteState
from client_app.training import train_epochs
from datasets.silos import Silo
from models.contract import (
    ARRAYS,
    INCOMING,
    KEPT_STATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    TRAIN,
    TRAINED,
    Instruction,
    measurement,
)
from models.errors import SiteError
from models.settings import CommonSettings, NoSettings


@dataclass(frozen=True)
class Request:
    """A message from the server: its instruction and its records."""

    instruction: Instruction
    content: RecordDict

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays that came, by name; empty if none came."""
        if ARRAYS not in self.content.array_records:
            return {}
        record = self.content.array_records[ARRAYS]
        # from_numpy shares memory with the message; the copy keeps the message as it came
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


class SiteMethod(ABC):
    """One method at one site, for one message.

    Class attributes:
        settings_class: the method's own settings.
    """

    settings_class: ClassVar[type] = NoSettings

    def __init__(
        self, request: Request, silo: Silo, common: CommonSettings, settings: Any, state: SiteState
    ) -> None:
        self.request = request
        self.silo = silo
        self.common = common
        self.settings = settings
        self.state = state
        self.compute = choose_compute(common.device, common.precision, common.threads)
        self.started = time.perf_counter()
        self.kept_state = False

    @abstractmethod
    def open_network(self) -> SiteNetwork:
        """Build the network from the message and the site's state."""

    @abstractmethod
    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the arrays that leave the site after training; may be empty."""

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the arrays that the site keeps for itself after training; may be empty."""
        return {}

    def answer(self) -> RecordDict:
        """Answer a phase: ``train`` here, other phases by the method named after them."""
        phase = self.request.instruction.phase
        if phase == TRAIN:
            return self.train()
        handler = getattr(self, f"phase_{phase}", None)
        if handler is None:
            raise SiteError(
                f"site {self.silo.name}: method '{self.common.method}' has no phase "
                f"'{phase}'; server and site run different versions of fedsilo"
            )
        records: RecordDict = handler()
        return records

    def train(self) -> RecordDict:
        """Measure the incoming model, train it on this silo, measure it again, reply."""
        network = self.open_network()
        instruction = self.request.instruction
        metrics = self.measured(network, INCOMING, ("val", "test")) if instruction.evaluate else {}
        loss = train_epochs(
            network, self.silo.train, self.common, self.compute, (instruction.round, self.silo.name)
        )
        metrics[measurement(TRAINED, "train", "loss")] = loss
        if instruction.evaluate:
            metrics |= self.measured(network, TRAINED, ("val",))
        if kept := self.kept(network):
            self.keep(kept)
        return self.reply(metrics, self.outgoing(network))

    def keep(self, arrays: dict[str, Tensor]) -> None:
        """Store private state for this phase; the reply will say that there is some."""
        self.state.store(self.request.instruction, arrays)
        self.kept_state = True

    def measure_only(self) -> RecordDict:
        """Measure the incoming model on validation and test data, and reply."""
        network = self.open_network()
        return self.reply(self.measured(network, INCOMING, ("val", "test")))

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Return the measurements of ``network`` on ``splits``, by MetricRecord key."""
        found: dict[str, float] = {}
        for split in splits:
            values = measure(
                network,
                getattr(self.silo, split),
                self.common,
                self.compute,
                (self.request.instruction.round, self.silo.name, model, split),
                self.token_watch(network),
            )
            found |= {measurement(model, split, key): value for key, value in values.items()}
        return found

    def token_watch(self, network: SiteNetwork) -> TokenWatch | None:
        """Return what the method measures of the tokens, anew for each split; None: nothing."""
        return None

    def reply(
        self, metrics: dict[str, float], arrays: dict[str, Tensor] | None = None
    ) -> RecordDict:
        """Pack a reply; ``seconds`` is the time since the message was opened."""
        record = MetricRecord(
            {
                **metrics,
                NUM_EXAMPLES: len(self.silo.train),
                SECONDS: time.perf_counter() - self.started,
                PEAK_MEMORY: peak_memory_bytes(),
                KEPT_STATE: int(self.kept_state),
            }
        )
        records = RecordDict({METRICS: record})
        if arrays:
            records[ARRAYS] = ArrayRecord(
                {
                    name: Array(tensor.detach().float().cpu().contiguous().numpy())
                    for name, tensor in sorted(arrays.items())
                }
            )
        return records


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held: on the GPU if it used one, else RSS."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
