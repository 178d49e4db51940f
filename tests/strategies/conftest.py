"""Fakes beside the strategies: sites that answer as a test wants, and a grid that looks on."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SiteFacts
from fedsilo.engines.inline_engine import InlineGrid, partition_configs
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants, meet_sites
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import make_reply
from tests.support.identity import flower_names  # noqa: F401

SITES = ("s1a", "s2a", "s3a")
Behaviour = Callable[[Message], RecordDict]
# What a site measures in a round that measures, and so all that any reply must hold.
MEASURED = {"trained.train.loss": 0.7} | {
    f"incoming.{split}.{metric}": 0.5
    for split in ("val", "test")
    for metric in ("accuracy", "entropy", "loss")
}


class SpyGrid(InlineGrid):
    """An in-process grid that keeps all messages, and loses those to the ``silent`` nodes."""

    def __init__(
        self,
        app: ClientApp,
        run_config: Mapping[str, Value],
        node_configs: Iterable[Mapping[str, Value]],
        silent: Collection[int] = (),
    ) -> None:
        super().__init__(app, run_config, node_configs)
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self.silent = silent

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        self.sent += pushed
        return super().push_messages(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        lost = {m.metadata.message_id for m in self.sent if m.metadata.dst_node_id in self.silent}
        found = list(super().pull_messages(set(message_ids) - lost))
        self.replies += found
        return found


class Recorder(Hook):
    """Remembers what the loop tells its hooks."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.failures: list[tuple[int, str, str, str]] = []
        self.states: list[State] = []
        self.phases: list[tuple[int, str, list[str]]] = []

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        self.events.append(("run started", state.round, total_rounds))

    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        self.events.append(("phase started", round_, phase))
        self.phases.append((round_, phase, sites))

    def reply_came(self, round_: int, phase: str, site: str) -> None:
        self.events.append(("reply came", round_, phase, site))

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        self.events.append(("phase ended", round_, phase, *replies))

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        self.failures.append((round_, phase, site, reason))

    def round_ended(self, state: State) -> None:
        self.events.append(("round ended", state.round))
        self.states.append(state)

    def run_ended(self, state: State) -> None:
        self.events.append(("run ended", state.round))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def spy_grid() -> Callable[..., SpyGrid]:
    """Return a builder of a spying grid over three simulated nodes."""

    def build(
        app: ClientApp, configs: Iterable[Mapping[str, Value]] = (), silent: Collection[int] = ()
    ) -> SpyGrid:
        return SpyGrid(app, {}, list(configs) or partition_configs(len(SITES)), silent)

    return build


def build_content(arrays: Mapping[str, Any] | None = None, **metrics: Any) -> RecordDict:
    """Return a reply of what all must hold; None leaves a metric out, underscores are dashes."""
    given = {key.replace("_", "-"): value for key, value in metrics.items()}
    told = {NUM_EXAMPLES: 36, SECONDS: 0.5, PEAK_MEMORY: 1000} | given
    record = MetricRecord({key: value for key, value in told.items() if value is not None})
    content = RecordDict({METRICS: record})
    if arrays is not None:
        content[ARRAYS] = ArrayRecord({n: Array(np.asarray(a)) for n, a in arrays.items()})
    return content


@pytest.fixture
def content() -> Callable[..., RecordDict]:
    return build_content


@pytest.fixture
def measured() -> dict[str, float]:
    """Return the measurements of a round that measures."""
    return dict(MEASURED)


@pytest.fixture
def site_reply() -> Callable[..., Reply]:
    """Return a builder of a checked reply: site, arrays, metrics."""
    return make_reply


@pytest.fixture
def answering() -> Callable[..., Behaviour]:
    """Return a builder of a good site: it answers with the arrays it got, set to ``value``."""

    def build(value: float = 1.0, **changes: Any) -> Behaviour:
        metrics = MEASURED | changes

        def answer(message: Message) -> RecordDict:
            if message.metadata.message_type == EVALUATE:
                return build_content(**metrics)
            received = message.content.array_records[ARRAYS]
            filled = {n: np.full(a.shape, value, np.float32) for n, a in received.items()}
            return build_content(filled, **metrics)

        return answer

    return build


@pytest.fixture
def fake_app(answering: Callable[..., Behaviour]) -> Callable[..., ClientApp]:
    """Return a builder of a ClientApp: one behaviour for all sites, others by site name."""

    def build(usual: Behaviour | None = None, **special: Behaviour) -> ClientApp:
        app = ClientApp()

        def answer(message: Message, context: Context) -> Message:
            site = SITES[int(context.node_config["partition-id"])]
            behave = special.get(site, usual or answering())
            return Message(behave(message), reply_to=message)

        app.train()(answer)
        app.evaluate()(answer)
        return app

    return build


@pytest.fixture
def participants() -> Participants:
    """Return the participants of three simulated sites behind the in-process grid's nodes."""
    facts = {
        site: SiteFacts(
            site,
            f"D{site[1]}",
            (1, 16, 16),
            10,
            {"train": [36], "val": [4], "test": [10]},
            {"train": "a"},
            simulated=True,
        )
        for site in SITES
    }
    return Participants(facts, {site: 1001 + index for index, site in enumerate(SITES)})


def sized(participants: Participants, sizes: Mapping[str, Mapping[str, int]]) -> Participants:
    """Return the participants with as many samples at a site and split as ``sizes`` says."""
    facts = {
        site: dataclasses.replace(
            found,
            label_counts=found.label_counts
            | {split: [size] for split, size in sizes.get(site, {}).items()},
        )
        for site, found in participants.facts.items()
    }
    return Participants(facts, participants.nodes)


@pytest.fixture
def started(
    spy_grid: Any, fake_app: Any, participants: Participants, recorder: Any
) -> Callable[..., tuple[SpyGrid, RoundLoop]]:
    """Return a function that runs FedAvg of one small array over fake sites."""

    def start(
        app: ClientApp | None = None,
        silent: tuple[int, ...] = (),
        state: State | None = None,
        timeout: float = 20,
        sizes: Mapping[str, Mapping[str, int]] | None = None,
        **common: Any,
    ) -> tuple[Any, RoundLoop]:
        settings = CommonSettings(silos=3, run_name="run", **{"rounds": 2, **common})
        method = FedAvg(settings, NoSettings(), sized(participants, sizes or {}))
        loop = RoundLoop(method, [recorder], "/somewhere")
        loop.state = state or State({"w": np.zeros(2, np.float32)})
        grid = spy_grid(app or fake_app(), silent=silent)
        loop.start(grid, settings.rounds, timeout)
        return grid, loop

    return start


def spy_on_run(
    values: Mapping[str, Value], folder: Path, hooks: Sequence[Hook] = ()
) -> tuple[SpyGrid, RoundLoop]:
    """Run settings with real sites on a spying grid, whose sites keep their state in ``folder``."""
    from fedsilo.client_app.app import app
    from fedsilo.server_app.config.settings import resolve
    from fedsilo.strategies.methods.registry import strategy_class

    settings = resolve({"run.name": "run", **values})
    grid = SpyGrid(app, settings.as_mapping(), partition_configs(len(SITES)))
    sites = meet_sites(grid, settings.common)
    method = strategy_class(settings.common.method)(settings.common, settings.own, sites)
    loop = RoundLoop(method, hooks, str(folder))
    loop.start(grid, settings.common.rounds, 60)
    return grid, loop


@pytest.fixture
def spied_run(tmp_path: Path) -> Callable[..., tuple[SpyGrid, RoundLoop]]:
    """Return a function that runs settings with real sites on a spying grid."""

    def run(values: Mapping[str, Value], hooks: Sequence[Hook] = ()) -> tuple[SpyGrid, RoundLoop]:
        return spy_on_run(values, tmp_path, hooks)

    return run


@pytest.fixture(scope="module")
def shared_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[SpyGrid, RoundLoop, Recorder]]:
    """Return ``spied_run`` for tests that only read a run: equal settings run once a file."""
    runs: dict[str, tuple[SpyGrid, RoundLoop, Recorder]] = {}

    def run(values: Mapping[str, Value]) -> tuple[SpyGrid, RoundLoop, Recorder]:
        key = json.dumps(values, sort_keys=True)
        if key not in runs:
            recorder = Recorder()
            folder = tmp_path_factory.mktemp("shared")
            runs[key] = (*spy_on_run(values, folder, [recorder]), recorder)
        return runs[key]

    return run


@pytest.fixture
def told() -> Callable[[Message], ConfigRecord]:
    """Return a function that reads a message's instruction."""
    return lambda message: message.content.config_records[CONFIG]
