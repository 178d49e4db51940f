"""A node's own config, and the record of a message while this node answers it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.app import Context, Message, RecordDict

from fedsilo.core.messages import SIMULATED_SITE
from fedsilo.core.settings_schema import Value, build

S = TypeVar("S")

OWN = ".own"  # within 'state-dir'; no run can have this name, because it begins with a dot


@dataclass
class Opened:
    """The course of one message.

    Attributes:
        data: whether reading patients' data has begun.
        hidden: whether the server must not see this site's own answers, including errors.
        why: the reason why the site did not answer, for its own log.
    """

    data: bool = False
    hidden: bool = False
    why: str = ""


@dataclass
class Answering:
    """A message while this node answers it; each guard reads it and adds to it."""

    message: Message
    # The node and the run. The site file's guard adds the file's limits to the node config
    context: Context
    # The answer; empty until there is one
    content: RecordDict = field(default_factory=RecordDict)
    # The site file as last read; None without one, or if it is unusable
    rules: Any = None
    # The state of patients' data, and the reason if there is no answer
    opened: Opened = field(default_factory=Opened)


_message: ContextVar[Opened | None] = ContextVar("message", default=None)


@contextmanager
def watching(opened: Opened) -> Iterator[None]:
    """Let ``opened`` record, within the block, what the answer to one message does."""
    token = _message.set(opened)
    try:
        yield
    finally:
        _message.reset(token)


def note_opening() -> None:
    """Record that patients' data are read from here on; called before the first byte is read."""
    opened = _message.get()
    if opened:
        opened.data = True


def forget_opening() -> None:
    """Record that the following depends only on the hospital's declaration of its data."""
    opened = _message.get()
    if opened:
        opened.data = False


def is_simulated(context: Context) -> bool:
    """Tell whether this is a simulated site; its own node config decides, never a message."""
    own = {"site", "state-dir", "site-file", "trust"} & context.node_config.keys()
    return "partition-id" in context.node_config and not own


def for_simulated_site(message: Message, context: Context) -> Context:
    """Return the context of the simulated site that a message names.

    In a simulation one SuperNode answers for several sites, perhaps for two at once, but Flower
    keeps one context for it. So the site gets a context of its own. A message that names no site is
    for the site in the node config, and a hospital is always the site in its node config.
    """
    if not is_simulated(context) or SIMULATED_SITE not in message.content.config_records:
        return context
    named = message.content.config_records.pop(SIMULATED_SITE)
    own = {key: int(str(named[key])) for key in ("partition-id", "num-partitions")}
    config = {**context.node_config, **own}
    return Context(context.run_id, context.node_id, config, RecordDict(), context.run_config)


def own_folder(context: Context, site: str) -> Path | None:
    """Return the folder that a hospital keeps over all runs; None without a 'state-dir'.

    It holds the ledger, the secret seed, the run book and the audit log. No run's name can lead
    into it.
    """
    return own_folder_of(context.node_config, site)


def own_folder_of(node_config: Mapping[str, Value], site: str) -> Path | None:
    """Return ``own_folder`` for a node config."""
    if "state-dir" not in node_config:
        return None
    return Path(str(node_config["state-dir"])) / OWN / site


def own_cache(context: Context) -> str:
    """Return a real site's cache: the node config's, else the environment's, else one of its own.

    Empty means the environment's, or the default one if no folder is named at all.
    """
    if "cache-dir" in context.node_config:
        return str(context.node_config["cache-dir"])
    if os.environ.get("FEDSILO_CACHE") or "state-dir" not in context.node_config:
        return ""
    return str(Path(str(context.node_config["state-dir"])) / OWN / "cache")


@contextmanager
def owner_only() -> Iterator[None]:
    """Make files written in the block readable only by their owner.

    State, ledgers, cache and secret seed are patients' data, whatever umask a SuperNode runs with.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def build_settings(cls: type[S], values: Mapping[str, Value]) -> S:
    """Return ``build(cls, values)``, cached because several callers need the same values.

    Raises:
        SettingError: a value has the wrong type or is out of range.
    """
    # The key has types, because true equals 1 but is not a count
    key = tuple((name, type(value), value) for name, value in values.items())
    plain: type = cls  # mypy does not accept type[S] as a hashable key
    return cast(S, _build_cached(plain, key))


@lru_cache(maxsize=64)
def _build_cached(cls: type, values: tuple[tuple[str, type, Value], ...]) -> object:
    return build(cls, {name: value for name, _, value in values})
