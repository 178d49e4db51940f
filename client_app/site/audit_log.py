"""A site's audit log: one JSON line per message, written before the answer leaves.

A line holds names, counts and bytes, never a value of the data. If a line cannot be written whole
and flushed to the disk, the answer stays at the site. The lines are chained (``log_chain``).
"""

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsilo.client_app.site.log_chain import (
    CHECK,
    NUMBER,
    START,
    Link,
    add_link,
    link_of,
    read_head,
    write_head,
)
from fedsilo.core.errors import RefusedError
from fedsilo.core.files.atomic_files import open_regular
from fedsilo.core.messages import CONFIG
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, defaults
from fedsilo.strategies.wire.records import record_bytes

ANSWERED, REFUSED, FAILED = "answered", "refused", "failed"

_LEDGER = "ledger"  # the key of the ledger's state in a line
_TAIL = 2**16  # the bytes read at the end of a log; many times the length of a line
_LONGEST = 200  # the most characters of a name that comes from a server
_LONGEST_REASON = 1000
_FIRST_MARK = re.compile(r"^([^/]*/[^./]*[./]).*", re.DOTALL)


class LedgerMark(TypedDict):
    """The state of a hospital's ledger of all runs."""

    releases: int  # the number of releases so far, which only grows
    sha256: str  # the digest of the ledger's file


def build_entry(
    site: str,
    message: Message,
    context: Context,
    reply: Message,
    outcome: str,
    why: str = "",
    ledger: LedgerMark | None = None,
) -> dict[str, Any]:
    """Build the audit log's line for a message and its reply, as keys and JSON values.

    The keys are "time", "site", "run", "run-id", "kind" (the message's type), "method", "dataset",
    "round", "phase", "outcome", "why", "records", "bytes-in" and "bytes-out", and "ledger" if there
    is one. "records" counts the names of the reply's arrays and values by pattern, such as
    ``arrays/head.*``. Values of the data are never logged. Names from the server are cut at 200
    characters, and "why" at 1,000.

    Args:
        site: the site's name.
        message: the server's message.
        context: the node and the run.
        reply: the reply that is about to leave.
        outcome: "answered", "refused" or "failed".
        why: the reason for a refusal or failure; empty to use the reply's error text.
        ledger: the state of the hospital's privacy ledger; None without a ledger.
    """
    received, leaving = RecordDict(), RecordDict()
    reason = ""
    if message.has_content():
        received = message.content
    if reply.has_content():
        leaving = reply.content
    if reply.has_error():
        reason = str(reply.error.reason)
    config = received.config_records.get(CONFIG, ConfigRecord())
    run = defaults(CommonSettings) | dict(context.run_config)
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "site": site,
        # A hello names no run, but the run config that comes with it does
        "run": _short(config.get("run-name", run["run.name"])),
        "run-id": context.run_id,
        "kind": _short(message.metadata.message_type),
        "method": _short(run["method"]),
        "dataset": _short(run["dataset"]),
        "round": _short(config.get("round", 0)),
        "phase": _short(config.get("phase", "")),
        "outcome": outcome,
        "why": (why or reason)[:_LONGEST_REASON],
        "records": group_names(names_in(leaving)),
        "bytes-in": record_bytes(received),
        "bytes-out": record_bytes(leaving) + len(reason.encode()),
    }
    if ledger:
        line[_LEDGER] = ledger
    return line


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to the audit log as JSON, flush it to the disk, and write the log's head.

    The line gets a number and a check value. The head is a file next to the log that stores these
    two values of the last line. A line about an older ledger must not hide the newer state. So if
    ``line`` has no ledger state, or one with fewer releases (charged answers), it gets the last
    line's. Processes that share a log wait for each other.

    Raises:
        RefusedError: the log or the head cannot be read or written. The log is cut back to its old
            size if the file system allows it. The error does not name the path.
    """
    import fcntl  # only on Linux and macOS, where hospitals' containers run

    with _open_log(path) as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        size = os.fstat(log).st_size
        last = _last_line(log, size)
        before, now = _mark_of(last), line.get(_LEDGER)
        if before and (not now or now["releases"] < before["releases"]):
            # A line about an older ledger, which was refused, must not hide the newer state
            line = {**line, _LEDGER: before}
        line = add_link(line, _last_link(path, last))
        data = json.dumps(line).encode() + b"\n"
        # A power cut tore the last line, and its answer never left
        torn = size and os.pread(log, 1, size - 1) != b"\n"
        if torn:
            data = b"\n" + data
        try:
            if os.write(log, data) != len(data):
                raise OSError(0, "only a part of the line went to the disk: it is full")
            os.fsync(log)
            write_head(path, Link(line[NUMBER], line[CHECK]))
        except OSError:
            # An append-only log cannot be shortened, so the next line starts on its own
            with suppress(OSError):
                os.ftruncate(log, size)
            raise


def last_ledger(path: Path) -> LedgerMark | None:
    """Read the privacy ledger's state from the last complete line of the audit log.

    The state has the number of releases (answers charged to the ledger) and the digest of the
    ledger's file. The result is None if the line has no such state, or if the log is empty. A
    missing log is created.

    Raises:
        RefusedError: the log cannot be opened or read. The error does not name the path.
    """
    with _open_log(path) as log:
        return _mark_of(_last_line(log, os.fstat(log).st_size))


def _last_line(log: int, size: int) -> dict[str, Any]:
    """Return the last valid line of an open log of ``size`` bytes, or {} if there is none.

    Only the last 64 KiB are read. A line is skipped if it is not a JSON object, or if its state of
    the privacy ledger is damaged. The line before it is then tried. A power failure may have cut
    the last line short. The reply that this line describes was then never sent.

    Args:
        log: the file descriptor of the log.
        size: the size of the log's file.
    """
    # The log grows for years, so only its end is read
    tail = os.pread(log, _TAIL, max(0, size - _TAIL))
    for text in reversed(tail.splitlines()):
        try:
            line = json.loads(text)
            _mark_of(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        found: dict[str, Any] = line
        return found
    return {}


def _mark_of(line: dict[str, Any]) -> LedgerMark | None:
    """Return the ledger's state in a line; None if the line lacks it."""
    mark = line.get(_LEDGER)
    if mark is None:
        return None
    return LedgerMark(releases=int(mark["releases"]), sha256=str(mark["sha256"]))


def _last_link(path: Path, last: dict[str, Any]) -> Link:
    """Return the number and the check value after which the log's next line is numbered.

    They come from the log's last line or from the head, a file next to the log. The higher number
    decides, and the head if the numbers are equal. A head with a higher number means that lines
    were removed or the log was moved away. The line numbers then show a gap. Without a numbered
    line and a head, the number is 0.

    Args:
        path: the log's path.
        last: the log's last line; {} if it has none.
    """
    logged, head = link_of(last) or START, read_head(path) or START
    if head.number >= logged.number:
        return head
    return logged


def check_log(path: Path) -> None:
    """Check that the audit log can be written, before any work is done that must be logged.

    The log's folder must be writable too, because the head, a file next to the log, is replaced. A
    missing log is created.

    Raises:
        RefusedError: the log cannot be opened, or its folder cannot be written. The error does not
            name the path.
    """
    with _open_log(path):
        if not os.access(path.parent, os.W_OK):  # the head is replaced and not changed
            raise OSError(errno.EACCES, "its folder must be writable as well")


def names_in(content: RecordDict) -> list[str]:
    """List the arrays and values of ``content`` as ``<record>/<key>``, sorted."""
    names = []
    for record, values in content.items():
        names += [f"{record}/{key}" for key in values]
    return sorted(names)


def group_names(names: Iterable[str]) -> dict[str, int]:
    """Count names of the form ``<record>/<key>`` by pattern, and return the number of each pattern.

    A pattern is a name in which everything after the first '.' or '/' of ``<key>`` is replaced by
    '*'. For example ``arrays/head.1.bias`` counts as ``arrays/head.*``. If ``<key>`` has no '.' and
    no '/', the whole name is the pattern.
    """
    return dict(Counter(_FIRST_MARK.sub(r"\1*", name) for name in names))


@contextmanager
def _open_log(path: Path) -> Iterator[int]:
    """Open the log for reading and appending, and close it after the block.

    Yields the file descriptor. A missing log is created.

    Raises:
        RefusedError: the log cannot be opened, or the block raised an OSError while it used the
            log.
    """
    try:
        log = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            yield log
        finally:
            os.close(log)
    except OSError as error:
        raise RefusedError(
            f"the site's audit log cannot be written ({error.strerror}), but nothing leaves "
            "unlogged: the hospital must see to its 'audit-log'"
        ) from None


def _short(value: object) -> Value:
    if isinstance(value, int):
        return value
    return str(value)[:_LONGEST]
