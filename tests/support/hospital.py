"""A real hospital as a malicious server meets it: the unaltered app, messages of its choice."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsilo.client_app.app import app
from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    HELLO,
    METRICS,
    TRAIN,
    Instruction,
)
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.maths.standardisation import pooled_statistics, standardise, sums_of
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.wire.records import to_record, unbundle
from tests.support.setting_keys import as_keys

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Hospital:
    """A site of made-up heart patients, and what it has answered.

    Attributes:
        home: its 'state-dir'.
        run: what the server's run config says, within what its own command checks.
        unchecked: what it says beyond that.
        node: what else the hospital's node config says.
        refusals: of messages that it did not answer.
    """

    home: Path
    run: dict[str, Any]
    site: str = "cleveland"
    node: dict[str, Any] = field(default_factory=dict)
    unchecked: dict[str, Any] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def context(self) -> Context:
        """Return the context that Flower gives the app."""
        own = {"site": self.site, "state-dir": str(self.home), "trust": "server", **self.node}
        usual = {
            "method": "fedavg",
            "dataset": "heart-synthetic",
            "data.standardise": "site",
            "network.name": "logistic",
            "train.mc-passes": 0,
            "rounds": 99,
            "machine.device": "cpu",
        }
        if self.run.get("dataset") == "images":  # no table, and no network of tables
            del usual["data.standardise"], usual["network.name"]
        config = resolve(as_keys(usual | self.run)).as_mapping() | as_keys(self.unchecked)
        return Context(1, 1001, own, RecordDict(), config)

    def send(
        self, kind: str, arrays: Mapping[str, Any] | None = None, **instruction: Any
    ) -> RecordDict | None:
        """Return the answer to a message, None where it was refused."""
        content = RecordDict({CONFIG: ConfigRecord({"hello": True})})
        if kind != HELLO:
            asked = {"round": 1, "phase": kind, "run_name": "attack", **instruction}
            content = RecordDict({CONFIG: ConfigRecord(dict(Instruction(**asked).to_config()))})
        if arrays is not None:
            content[ARRAYS] = to_record(
                {k: np.asarray(v, dtype=np.float32) for k, v in arrays.items()}
            )
        reply = app(Message(content, 1001, kind, group_id="1"), self.context())
        if reply.has_error():
            self.refusals.append(str(reply.error.reason))
            return None
        return unbundle(reply.content)

    def train(self, arrays: Mapping[str, Any], **instruction: Any) -> Arrays | None:
        """Return by how much the arrays changed, None where nothing came."""
        reply = self.send(TRAIN, arrays, evaluate=False, **instruction)
        if reply is None or ARRAYS not in reply:
            return None
        return {
            name: array.numpy().astype(np.float64) - np.asarray(arrays[name], dtype=np.float32)
            for name, array in reply[ARRAYS].items()
            if name in arrays
        }

    def metrics(self, arrays: Mapping[str, Any], **instruction: Any) -> dict[str, float] | None:
        """Return what a message that returns no arrays tells."""
        reply = self.send(TRAIN, arrays, returns=False, **instruction)
        return None if reply is None else {k: float(str(v)) for k, v in reply[METRICS].items()}

    def evaluate(self, arrays: Mapping[str, Any], **instruction: Any) -> dict[str, float] | None:
        """Return what an evaluation tells."""
        reply = self.send(EVALUATE, arrays, **instruction)
        return None if reply is None else {k: float(str(v)) for k, v in reply[METRICS].items()}

    def silo(self) -> Silo:
        """Return what the hospital holds: no server has it."""
        data = ("dataset", "task", "split.silos", "split.silo-train-size", "split.silo-test-size")
        told = {key: self.run[key] for key in data if key in self.run}
        usual = {"dataset": "heart-synthetic", "method": "fedavg"}
        return load_silo(self.site, resolve(usual | told).common)

    def rows(self) -> np.ndarray[Any, Any]:
        """Return the training rows or images as its networks see them, (n, features), in sd."""
        silo = self.silo()
        inputs = silo.train.inputs.flatten(1)
        if not silo.features:
            return np.asarray(inputs, dtype=np.float64)
        statistics = pooled_statistics([sums_of(inputs)])
        if self.run.get("data.standardise") == "declared" and silo.declared is not None:
            statistics = silo.declared
        return np.asarray(standardise(inputs, statistics), dtype=np.float64)

    def recovered(self, candidates: Iterable[np.ndarray[Any, Any]], error: float = 0.1) -> int:
        """Return how many training rows some candidate is within ``error`` sd of (rms)."""
        found = [c for c in candidates if np.isfinite(c).all()]
        if not found:
            return 0
        return int((self.nearest(found) < error).sum())

    def nearest(self, candidates: Iterable[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Return how far (rms, in sd) each row (n,) is from the candidate that is nearest to it."""
        found = np.stack([c for c in candidates if np.isfinite(c).all()])
        least = [np.sqrt(((found - row) ** 2).mean(axis=1).min()) for row in self.rows()]
        return np.array(least)


def files_below(folder: Path) -> list[str]:
    """Return the files below a folder, with those of hidden folders."""
    return sorted(os.path.join(base, f) for base, _, names in os.walk(folder) for f in names)


def seeded(number: int) -> np.random.Generator:
    """Return an attacker's own random numbers."""
    torch.manual_seed(number)
    return np.random.default_rng(number)
