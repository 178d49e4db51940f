"""Methods at work on quadratic losses, both ends and no messages between, to compare with NumPy.

Site k's loss is w H_k w / 2 - b_k w, whatever the batch: its gradient is H_k w - b_k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor, nn

from fedsilo.client_app.answer import answer
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import finished_session
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.core.messages import ARRAYS, CONFIG, KEPT_STATE, Instruction, state_key
from fedsilo.core.site_facts import SiteFacts
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.strategies.loop.ask import Ask, Question, Replies
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.records import to_record, unpack
from fedsilo.strategies.wire.reply import Reply
from tests.support.setting_keys import as_keys

RATE = 0.1
START = (1.0, -1.0)
SITES = ("a", "b", "c")
SAMPLES = (2, 4, 6)  # in batches of two: one, two and three steps an epoch
HESSIANS = np.array(
    [[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 3.0]], [[0.5, -0.2], [-0.2, 1.5]]]
)
SLOPES = np.array([[1.0, -1.0], [0.5, 2.0], [-2.0, 0.3]])


class Quadratic(SiteNetwork):
    """Two weights w and a site's loss."""

    evidence = None

    def __init__(self, site: str) -> None:
        super().__init__()
        place = SITES.index(site)
        self.h, self.b = (torch.tensor(a[place], dtype=torch.float32) for a in (HESSIANS, SLOPES))
        self.w = nn.Parameter(torch.zeros(2))

    def encode(self, inputs: Tensor) -> Tensor:
        return inputs

    def classify(self, features: Tensor) -> Tensor:
        return features

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.w @ self.h @ self.w / 2 - self.b @ self.w


def silo_of(site: str) -> Silo:
    """Return a silo whose samples only count."""
    count = SAMPLES[SITES.index(site)]
    split = Split(torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))
    empty = Split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))
    return Silo(site, "D1", NetworkShape((1,), 2), split, empty, empty, {})


class QuadraticAsk(Ask):
    """Has each site answer by its own side of the method; replies are as a server decodes them."""

    def __init__(
        self,
        settings: RunSettings,
        round_: int,
        folder: Path,
        away: Sequence[str],
        lost: Sequence[str],
        kept: dict[str, int],
    ) -> None:
        self.settings, self.round, self.folder, self.lost = settings, round_, folder, lost
        self.sites = [site for site in SITES if site not in away]
        self.stateful_sites = self.kept = kept

    def put(self, question: Question) -> Replies:
        replies = {site: self._reply(site, question) for site in question.send}
        usable = {site: reply for site, reply in replies.items() if site not in self.lost}
        self.kept.update({s: state_key(self.round, 0) for s, r in usable.items() if r.keeps_state})
        return Replies(usable)

    def _reply(self, site: str, question: Question) -> Reply:
        common = self.settings.common
        session = finished_session(common, self.settings.own, silo_of(site))
        expects = self.kept.get(site, 0)
        told = Instruction(
            self.round, question.phase, run_name="run", evaluate=False, expects_state=expects
        )
        content = RecordDict({CONFIG: ConfigRecord(dict(told.to_config()))})
        content[ARRAYS] = to_record(question.send[site])
        lab = Lab(session, content, told, SiteState(self.folder / site))
        packed = answer(lab)
        arrays = {name: unpack(array) for name, array in packed[ARRAYS].items()}
        metrics = {key: float(value) for key, value in packed["metrics"].items()}  # type: ignore[arg-type]
        keeps = metrics[KEPT_STATE] == 1
        return Reply(site, arrays, metrics, SAMPLES[SITES.index(site)], keeps_state=keeps)


def rounds_of(
    method: str,
    folder: Path,
    monkeypatch: Any,
    away: Mapping[int, Sequence[str]],
    rounds: int = 10,
    lost: Mapping[int, Sequence[str]] = MappingProxyType({}),
    **own: Any,
) -> list[np.ndarray[Any, Any]]:
    """Return w after each round.

    ``away`` names the sites that a round does not ask, ``lost`` those whose reply never comes.
    """
    start, method_file = {"w": np.float32(START)}, "fedsilo.strategies.loop.method"
    monkeypatch.setattr(
        "fedsilo.client_app.lab.initial_classifier", lambda _, silo, task: Quadratic(silo.name)
    )
    monkeypatch.setattr(f"{method_file}.starting_network", lambda *_: None)
    monkeypatch.setattr(f"{method_file}.initial_weights", lambda _: start)
    values = {
        "train.batch-size": 2,
        "train.optimiser": "sgd",
        "train.learning-rate": RATE,
        "train.local-epochs": 1,
    }
    values["rounds"] = rounds
    settings = resolve(
        as_keys({"method": method, "machine.device": "cpu", "seed": 1, **values, **own})
    )
    facts = {
        site: SiteFacts(site, "D1", (1,), 2, {"train": [count]}, {})
        for site, count in zip(SITES, SAMPLES, strict=True)
    }
    server = strategy_class(method)(settings.common, settings.own, Participants(facts, {}))
    state: State = server.initial_state()
    found, kept = [], dict[str, int]()
    for number in range(1, rounds + 1):
        ask = QuadraticAsk(
            settings, number, folder, away.get(number, ()), lost.get(number, ()), kept
        )
        state = replace(server.round(state, ask), round=number)
        found.append(np.asarray(server.model(state)["w"]))
    return found
