"""What a node's own config says of it, and a message while this node answers it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.app import Context, Message, RecordDict

from fedsilo.models.contract.messages import SIMULATED_SITE
from fedsilo.models.contract.settings_schema import Value, build

S = TypeVar("S")

OWN = ".own"  # in the 'state-dir'; no run can be called so, for its name begins with a dot


@dataclass
class Opened:
    """The course of one message.

    Attributes:
        data: whether it has begun to read patients' data.
        hidden: whether the server must not see single answers, errors included.
        why: the reason why the site did not answer, for its own log.
    """

    data: bool = False
    hidden: bool = False
    why: str = ""


@dataclass
class Answering:
    """A message while this node answers it; each guard reads it and adds what it knows."""

    message: Message
    # The node and the run. The guard of the site file puts the file's limits over the node config
    context: Context
    # The answer; empty until there is one
    content: RecordDict = field(default_factory=RecordDict)
    # The site file as it was last read; None without one, or if it cannot be used
    rules: Any = None
    # Whether the patients' data have been opened, and why there is no answer
    opened: Opened = field(default_factory=Opened)


def is_simulated(context: Context) -> bool:
    """Tell whether this is a site of a simulation: by its own node config, never by a message."""
    own = {"site", "state-dir", "site-file", "trust"} & context.node_config.keys()
    return "partition-id" in context.node_config and not own


def for_simulated_site(message: Message, context: Context) -> Context:
    """Return the context of the simulated site that a message names.

    In a simulation a SuperNode answers for several sites, perhaps for two at once, and Flower keeps
    one context for it. The site therefore gets a context of its own. A message that names no site
    is for the site in the node config, and a hospital is only ever the site in its node config.
    """
    if not is_simulated(context) or SIMULATED_SITE not in message.content.config_records:
        return context
    named = message.content.config_records.pop(SIMULATED_SITE)
    own = {key: int(str(named[key])) for key in ("partition-id", "num-partitions")}
    config = {**context.node_config, **own}
    return Context(context.run_id, context.node_id, config, RecordDict(), context.run_config)


def own_folder(context: Context, site: str) -> Path | None:
    """Return the folder of what a hospital keeps over all runs, or None if it named no 'state-dir'.

    The ledger, the secret seed, the run book and the audit log are there: no run's name reaches it.
    """
    return own_folder_of(context.node_config, site)


def own_folder_of(node_config: Mapping[str, Value], site: str) -> Path | None:
    """Return ``own_folder`` of a node config."""
    if "state-dir" not in node_config:
        return None
    return Path(str(node_config["state-dir"])) / OWN / site


def own_cache(context: Context) -> str:
    """Return a real site's cache: its node config's, else its environment's, else its own.

    An empty text means the environment's, or the usual one, where no folder is named at all.
    """
    if "cache-dir" in context.node_config:
        return str(context.node_config["cache-dir"])
    if os.environ.get("FEDSILO_CACHE") or "state-dir" not in context.node_config:
        return ""
    return str(Path(str(context.node_config["state-dir"])) / OWN / "cache")


@contextmanager
def owner_only() -> Iterator[None]:
    """Let what a real site writes in the block be readable by its owner alone.

    State, ledgers, cache and secret seed are patients' data, whatever umask a SuperNode runs under.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def built(cls: type[S], values: Mapping[str, Value]) -> S:
    """Return ``build(cls, values)``, checked once in this process: several places ask for the same.

    Raises:
        SettingError: a value has the wrong type or lies outside its range.
    """
    # Types are part of the key: true equals 1, and only one of them is a count
    key = tuple((name, type(value), value) for name, value in values.items())
    plain: type = cls  # mypy takes type[S] for nothing that can be a key
    return cast(S, _built(plain, key))


@lru_cache(maxsize=64)
def _built(cls: type, values: tuple[tuple[str, type, Value], ...]) -> object:
    return build(cls, {name: value for name, _, value in values})
