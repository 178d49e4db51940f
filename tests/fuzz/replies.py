"""Kinds ``reply-<method>`` and ``hello-<data set>``: a run over answers of before, one mutated.

``reply-<way>`` are of a way to send what FedAvg trains.

A method's honest answers are taken once, of a tiny run. A trial runs the server again over those
answers, without any site, and one of them is changed. So it meets all that the server does with a
reply: opening, checking, combining, recording, and its console.
"""

import io
import logging
from collections.abc import Callable, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.client_app.app import app
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import CONFIG, HELLO
from fedsilo.core.methods import METHODS
from fedsilo.core.settings_schema import Value
from fedsilo.engines.inline_engine import InlineGrid, flower_identity, partition_configs
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.run.runner import run
from tests.fuzz.driver import Kind, Trial
from tests.fuzz.mutations import hostile_text
from tests.fuzz.oracle import line_faults, run_directory_faults
from tests.fuzz.reply_mutations import copied, mutate_config, mutate_reply
from tests.support.tiny import TINY, TINY_METHOD

SITES = 3
_TABLE: dict[str, Value] = {
    "dataset": "heart-synthetic",
    "network.name": "mlp",
    "train.mc-passes": 2,
    "split.val-folds": 4,
}
# Ways to send what FedAvg trains
_WAYS: dict[str, dict[str, Value]] = {
    "secure": {"clip-norm": 2.0, "secure-aggregation": "secagg"},
    "bf16": {"server.wire-precision": "bf16", "server.wire-down": "bf16"},
}
_HELLOS: dict[str, dict[str, Value]] = {"digits": {}, "heart-synthetic": _TABLE}
_ONLY_IMAGES = ("split.silos", "split.silo-train-size", "split.silo-test-size", "network.width")

Key = tuple[int, str, int, int]


def kinds() -> list[Kind]:
    """Return a kind for each method of the table, of other messages, and two of hellos."""
    replies = [Kind(f"reply-{name}", lambda f, m=name: _replies(f, m), 2) for name in METHODS]
    replies.append(Kind("reply-images", lambda f: _replies(f, "fedavg", images=True), 3))
    for way in _WAYS:
        replies.append(Kind(f"reply-{way}", lambda f, w=way: _replies(f, "fedavg", way=w), 3))
    hellos = [Kind(f"hello-{name}", lambda f, n=name: _hellos(f, n), 8) for name in _HELLOS]
    return [*replies, *hellos]


def _key(message: Message) -> Key:
    """Return what tells one message of a run from all others: node, kind, round, step."""
    meta, config = message.metadata, message.content.config_records[CONFIG]
    asked = int(str(config.get("round", 0))), int(str(config.get("step", 0)))
    return (meta.dst_node_id, meta.message_type, *asked)


@dataclass
class _Answers:
    """Honest answers by message, and the settings of the run that they are of."""

    values: dict[str, Value]
    by_key: dict[Key, RecordDict]

    def settings(self, out: Path, min_sites: int) -> RunSettings:
        named = {"run.name": "run", "run.out": str(out), "run.min-sites": min_sites}
        return resolve(self.values | named)


class ReplayGrid(InlineGrid):
    """A grid whose nodes give the answers of before, where ``answers`` has none an error."""

    def __init__(self, answers: Mapping[Key, RecordDict | Error]) -> None:
        super().__init__(ClientApp(), {}, partition_configs(SITES))
        self._answers = answers

    def answer(self, message: Message) -> Message:
        found = self._answers.get(_key(message), Error(2, "there is no such answer"))
        if isinstance(found, Error):
            return Message(found, reply_to=message)
        return Message(RecordDict(dict(found.items())), reply_to=message)


class _TakingGrid(InlineGrid):
    """A grid of real sites that keeps what they answer."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        super().__init__(app, values, partition_configs(SITES))
        self.taken: dict[Key, RecordDict] = {}

    def answer(self, message: Message) -> Message:
        key, reply = _key(message), super().answer(message)
        if reply.has_content():
            self.taken[key] = copied(reply.content)
        return reply


def _taken(folder: Path, values: dict[str, Value]) -> _Answers:
    """Run honestly, and return what the sites answered."""
    settings = resolve(values | {"run.name": "honest", "run.out": str(folder)})
    with flower_identity(), redirect_stdout(io.StringIO()):
        grid = _TakingGrid(settings.as_mapping())
        directory = run(grid, settings)
    faults = list(run_directory_faults(directory.path))
    assert not faults, f"an honest run is at fault: {faults}"
    return _Answers(values, grid.taken)


def _values(method: str, images: bool = False, way: str = "") -> dict[str, Value]:
    """Return tiny settings of a method: of a table's, which has few arrays, if it takes any."""
    values = TINY | {"method": method} | TINY_METHOD.get(method, {}) | _WAYS.get(way, {})
    table = {key: value for key, value in values.items() if key not in _ONLY_IMAGES} | _TABLE
    try:
        resolve(table)
    except SettingError:
        return values
    return values if images else table


def _replies(
    folder: Path, method: str, images: bool = False, way: str = ""
) -> Callable[[Trial], None]:
    answers = _taken(folder, _values(method, images, way))
    asked = sorted(key for key in answers.by_key if key[1] != HELLO)

    def trial(one: Trial) -> None:
        changed: dict[Key, RecordDict | Error] = dict(answers.by_key)
        key = one.rng.choice(asked)
        one.done.append(f"node {key[0]} {key[1]} round {key[2]} step {key[3]}")
        if one.rng.random() < 0.08:
            code = one.rng.choice([0, 2, 1001, 1002, 2**31, -1])
            changed[key] = Error(code, hostile_text(one.rng))
            one.done.append(f"an error of code {code}")
        elif answers.by_key[key].config_records and one.rng.random() < 0.8:
            changed[key] = mutate_config(one.rng, answers.by_key[key], one.done)
        else:
            changed[key] = mutate_reply(one.rng, answers.by_key[key], one.done)
        _run_again(one, answers, changed)

    return trial


def _hellos(folder: Path, dataset: str) -> Callable[[Trial], None]:
    answers = _taken(folder, _values("fedavg", images=not _HELLOS[dataset]))
    asked = sorted(key for key in answers.by_key if key[1] == HELLO)

    def trial(one: Trial) -> None:
        changed: dict[Key, RecordDict | Error] = dict(answers.by_key)
        for key in one.rng.sample(asked, one.rng.choice([1, 1, 2, 3])):
            one.done.append(f"node {key[0]}")
            if one.rng.random() < 0.1:
                changed[key] = Error(one.rng.choice([0, 2, 1002]), hostile_text(one.rng))
            else:
                changed[key] = mutate_config(one.rng, answers.by_key[key], one.done)
        _run_again(one, answers, changed)

    return trial


def _run_again(one: Trial, answers: _Answers, changed: Mapping[Key, RecordDict | Error]) -> None:
    """Run over the answers, and look at all that is left behind."""
    runs = one.folder / "runs"
    settings = answers.settings(runs, one.rng.choice([1, 2, 0]))
    try:
        with flower_identity(), listening(one):
            run(ReplayGrid(changed), settings)
    except SiteError as error:
        one.faults += line_faults(str(error))
        raise
    finally:
        one.faults += run_directory_faults(runs)
        strays = [path.name for path in one.folder.iterdir() if path != runs]
        strays += [path.name for path in runs.glob("*") if path.name != "run"]
        one.faults += [f"outside the run directory: {name!r}" for name in strays]


@contextmanager
def listening(one: Trial) -> Any:
    """Keep what the block prints and logs in ``shown``."""
    console, log = io.StringIO(), io.StringIO()
    handler, logger = logging.StreamHandler(log), logging.getLogger("flwr")
    before, logger.handlers, logger.propagate = logger.handlers, [handler], False
    try:
        with redirect_stdout(console), redirect_stderr(console):
            yield
    finally:
        logger.handlers, logger.propagate = before, True
        one.shown += [console.getvalue(), log.getvalue()]
