"""When the server last saw a hospital's node, and why a hospital that cannot start is missing.

Flower's server stores of each node only times and one number, the heartbeat interval. A hospital
whose start fails connects for a moment with an interval that stands for the failed check, and
disconnects. Its message is not sent, because it may name the hospital's own files.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from fedsilo.deployment.deployment import SERVER, Deployment

# A check's place is its number on the wire: append new ones at the end
FAULTS = (
    "start",
    "software",
    "node config",
    "site file",
    "signing",
    "port",
    "disk",
    "memory",
    "data folder",
    "gpu",
)
# Flower's server takes intervals from 10 to 1800 s, and a node that runs has 30 s
_FIRST = 1000.0
_COLUMNS = "node_id, last_activated_at, last_deactivated_at, heartbeat_interval"


@dataclass(frozen=True)
class NodeTimes:
    """Times and faults of one node's connections, as the server's database holds them."""

    connected: datetime | None = None  # begin of its newest connection, in UTC; None if never
    left: datetime | None = None  # end of a connection; None if none has ended
    fault: str = ""  # the check that its newest start failed, or empty


def interval_for(check: str) -> float:
    """Return the heartbeat interval that tells the server which check failed at a node.

    A node that cannot start sends this interval, in seconds, as a code. It is 1000 plus the
    check's place in ``FAULTS``, counted from 0. A check that is not in the list gets the code of
    "start", the first entry.
    """
    place = 0
    if check in FAULTS:
        place = FAULTS.index(check)
    return _FIRST + place


def fault_of(interval: float | None) -> str:
    """Return the name of the failed check that a node reported by its heartbeat interval.

    ``interval_for`` defines these intervals. The name is empty if ``interval`` is None, is an
    ordinary interval, or belongs to no known check.
    """
    if interval is None:
        return ""
    place = int(interval - _FIRST)
    if 0 <= place < len(FAULTS) and interval == _FIRST + place:
        return FAULTS[place]
    return ""


def read_node_times(deployment: Deployment) -> dict[str, NodeTimes]:
    """Read from the server's database when each node connected and left, by node id.

    If the database does not exist yet or cannot be read, for example because another version of
    Flower wrote it, the result is empty. This is not an error, because the times are only
    additional information.
    """
    database = deployment.home(SERVER) / "superlink.db"
    if not database.is_file():
        return {}
    try:
        # Read-only, because the database belongs to the server, which may be writing to it
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened:
            rows = opened.execute(f"SELECT {_COLUMNS} FROM node").fetchall()
    except sqlite3.Error:
        return {}
    times = {}
    for node, connected, left, interval in rows:
        # SQLite has no unsigned numbers, so Flower stores the larger half of them as negative ones
        number = str(node % 2**64)
        times[number] = NodeTimes(_time(connected), _time(left), fault_of(interval))
    return times


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    return datetime.fromisoformat(text).astimezone(UTC)
