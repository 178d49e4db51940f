"""A node's own config, and the record of one message while this node answers it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.app import Context, Message, RecordDict

from fedsilo.core.files.site_names import folder_name
from fedsilo.core.messages import SIMULATED_SITE
from fedsilo.core.settings_schema import Value, build, values_of

S = TypeVar("S")

OWN = ".own"  # within 'state-dir'; no run can have this name, because it begins with a dot


@dataclass
class Opened:
    """Whether patients' data were opened for one message, and why the site gave no answer.

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
def track_opening(opened: Opened) -> Iterator[None]:
    """Use ``opened``, until the block ends, to record whether this message opens patients' data.

    Before code in the block reads data, it calls ``note_opening``, which sets ``opened.data``.
    Later this field decides which errors may leave the site. Each thread has its own record. After
    the block, the record from before the block is used again.
    """
    token = _message.set(opened)
    try:
        yield
    finally:
        _message.reset(token)


def note_opening() -> None:
    """Record that the patients' data are being read; called before the first byte is read."""
    opened = _message.get()
    if opened:
        opened.data = True


def forget_opening() -> None:
    """Record that errors depend only on the declaration from here on, although data were read."""
    opened = _message.get()
    if opened:
        opened.data = False


def is_simulated(context: Context) -> bool:
    """Tell from the node config whether this node is a simulated site.

    A simulated site has a 'partition-id', but no 'site', 'state-dir', 'site-file' or 'trust'.
    Nothing in a message can change the result.
    """
    own = {"site", "state-dir", "site-file", "trust"} & context.node_config.keys()
    return "partition-id" in context.node_config and not own


def context_of_simulated_site(message: Message, context: Context) -> Context:
    """Return the context of the one simulated site that a message is for.

    In a simulation one SuperNode answers for several sites, but Flower has only one context for it.
    The message's record ``SIMULATED_SITE`` names the site's partition. The new context has this
    partition in its node config, and no stored state. The record is then removed from the message.
    If there is no such record, or the node is a real hospital, ``context`` is returned unchanged.
    """
    if not is_simulated(context) or SIMULATED_SITE not in message.content.config_records:
        return context
    named = message.content.config_records.pop(SIMULATED_SITE)
    own = {key: int(str(named[key])) for key in ("partition-id", "num-partitions")}
    config = {**context.node_config, **own}
    return Context(context.run_id, context.node_id, config, RecordDict(), context.run_config)


def own_folder(context: Context, site: str) -> Path | None:
    """Return the hospital's folder for all runs, ``<state-dir>/.own/<site>``.

    The result is None if the node config has no 'state-dir'. The folder contains the ledger of
    spent epsilon, the secret seed and the run book (the record of answered messages). It also
    contains the audit log, unless the site file names another place. The folder is not created
    here.
    """
    return own_folder_of(context.node_config, site)


def own_folder_of(node_config: Mapping[str, Value], site: str) -> Path | None:
    """Return the hospital's folder for all runs, ``<state-dir>/.own/<site>``.

    The result is None if the node config has no 'state-dir'. The folder is not created here.
    """
    if "state-dir" not in node_config:
        return None
    return Path(str(node_config["state-dir"])) / OWN / folder_name(site)


def own_cache(context: Context) -> str:
    """Return the node's cache folder; "" means the default folder.

    The node config's 'cache-dir' comes first. Without it, the result is "" if the environment
    variable FEDSILO_CACHE sets the default folder, or if the node config has no 'state-dir'.
    Otherwise the result is ``<state-dir>/.own/cache``.
    """
    if "cache-dir" in context.node_config:
        return str(context.node_config["cache-dir"])
    if os.environ.get("FEDSILO_CACHE") or "state-dir" not in context.node_config:
        return ""
    return str(Path(str(context.node_config["state-dir"])) / OWN / "cache")


@contextmanager
def owner_only() -> Iterator[None]:
    """Set the umask for the block: new files and folders are accessible only to their owner.

    These files contain patients' data or secrets, so they must not depend on the umask with which
    the SuperNode was started. The old umask is restored after the block.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def build_settings(cls: type[S], values: Mapping[str, Value]) -> S:
    """Build an object of the settings class ``cls`` from values by key.

    A missing key gets its default, and keys that are not settings of ``cls`` are ignored. The
    result is cached, because several callers need the same settings.

    Raises:
        SettingError: a value has the wrong type or is outside the range of its setting.
    """
    # The key has types, because true equals 1 but is not a count
    key = tuple((name, type(value), value) for name, value in values.items())
    plain: type = cls  # mypy does not accept type[S] as a hashable key
    return cast(S, _build_cached(plain, key))


@lru_cache(maxsize=64)
def _build_cached(cls: type, values: tuple[tuple[str, type, Value], ...]) -> object:
    given = {name: value for name, _, value in values}
    # Flower's run config has the settings of every method; the server has refused unknown keys
    return build(cls, values_of(cls, given))
