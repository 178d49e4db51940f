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
    """Record in ``opened``, until the block ends, whether patients' data are being read.

    In the block, ``note_opening`` and ``forget_opening`` set the field ``data`` of ``opened``. This
    field later decides which errors may leave the site. Messages in other threads have their own
    records. After the block, the record from before the block is in use again.
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
    """Tell whether this node is a simulated site; its own node config decides, never a message.

    A simulated site has a 'partition-id', but no 'site', 'state-dir', 'site-file' or 'trust'.
    """
    own = {"site", "state-dir", "site-file", "trust"} & context.node_config.keys()
    return "partition-id" in context.node_config and not own


def context_of_simulated_site(message: Message, context: Context) -> Context:
    """Return the context of the one simulated site that a message is for.

    In a simulation one SuperNode answers for several sites, perhaps for two at once, but Flower has
    only one context for it. A record of the message names the site's partition. The new context has
    this partition in its node config, and an empty state. The record is then removed from the
    message. If there is no such record, or this is a real hospital, ``context`` is returned
    unchanged.
    """
    if not is_simulated(context) or SIMULATED_SITE not in message.content.config_records:
        return context
    named = message.content.config_records.pop(SIMULATED_SITE)
    own = {key: int(str(named[key])) for key in ("partition-id", "num-partitions")}
    config = {**context.node_config, **own}
    return Context(context.run_id, context.node_id, config, RecordDict(), context.run_config)


def own_folder(context: Context, site: str) -> Path | None:
    """Return the hospital's folder for all runs, ``<state-dir>/.own/<site>``.

    The result is None if the node config has no 'state-dir'. The folder has the ledger, the secret
    seed and the run book (the record of answered messages). It also has the audit log, unless the
    site file names another place. No run's folder can be the same, because a run's name cannot
    begin with a dot. The folder is not created here.
    """
    return own_folder_of(context.node_config, site)


def own_folder_of(node_config: Mapping[str, Value], site: str) -> Path | None:
    """Return the folder that a hospital keeps over all runs; None without a 'state-dir'.

    See ``own_folder``, which takes Flower's context instead of the node config.
    """
    if "state-dir" not in node_config:
        return None
    return Path(str(node_config["state-dir"])) / OWN / folder_name(site)


def own_cache(context: Context) -> str:
    """Return the node's cache folder; "" means the default folder.

    The node config's 'cache-dir' comes first. Without it, the result is "" if the environment
    variable FEDSILO_CACHE is set (the default folder then follows it) or if the node config has no
    'state-dir'. Otherwise the cache is a folder within 'state-dir'.
    """
    if "cache-dir" in context.node_config:
        return str(context.node_config["cache-dir"])
    if os.environ.get("FEDSILO_CACHE") or "state-dir" not in context.node_config:
        return ""
    return str(Path(str(context.node_config["state-dir"])) / OWN / "cache")


@contextmanager
def owner_only() -> Iterator[None]:
    """Set the umask for the block: files written in it are accessible only to their owner.

    State, ledgers, cache and secret seed contain patients' data or secrets, so they must not depend
    on the umask with which the SuperNode was started. The old umask is restored after the block.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def build_settings(cls: type[S], values: Mapping[str, Value]) -> S:
    """Build an object of the settings class ``cls`` from values by key.

    A missing key gets its default, and keys that belong to other classes are ignored. The result is
    cached, because several callers need the same settings.

    Raises:
        SettingError: a value has the wrong type or is not allowed.
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
