"""The hospital's ledger and its audit log check each other.

Each line of the audit log records the state of the ledger. A ledger behind the log is an older copy
that somebody restored, or it was removed. With such a ledger patients' privacy would be spent
twice.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.site.audit_log import LedgerMark, last_ledger
from fedsilo.client_app.site.identity import own_name, refusing_as
from fedsilo.client_app.site.node import Answering, own_folder
from fedsilo.client_app.site.policy import log_path
from fedsilo.core.errors import RefusedError
from fedsilo.core.files.atomic_files import read_regular


def ledger_mark(context: Context) -> LedgerMark | None:
    """Return the length and the digest of the hospital's ledger of all runs; None without one.

    Raises:
        CheckpointError: the ledger is damaged.
    """
    folder = own_folder(context, own_name(context))
    if folder is None or not (folder / LEDGER).exists():
        return None
    path = folder / LEDGER
    count = sum(Ledger(path, 0.0, 1e-5, of_all_runs=True).releases().values())
    return {"releases": count, "sha256": hashlib.sha256(read_regular(path)).hexdigest()}


@contextmanager
def by_newest_ledger(answering: Answering) -> Iterator[None]:
    """Answer a message only if the ledger is not older than the audit log.

    Raises:
        RefusedError: the ledger is older; names both counts.
    """
    context = answering.context
    with refusing_as(own_name(context)):
        refuse_older_ledger(log_path(context, answering.rules), context)
    yield


def refuse_older_ledger(log: Path, context: Context) -> None:
    """Refuse a ledger that is behind the last line of the audit log.

    Raises:
        RefusedError: the ledger has fewer releases than the log, or as many but different ones.
        CheckpointError: the ledger is damaged.
    """
    # Read before the ledger, because messages that are answered at the same time spend too
    logged = last_ledger(log)
    if logged is None:
        return
    mark = ledger_mark(context) or {"releases": 0, "sha256": ""}
    fault = ""
    if mark["releases"] < logged["releases"]:
        fault = f"has {mark['releases']} releases, but its audit log says {logged['releases']}"
    elif mark["releases"] == logged["releases"] and mark["sha256"] != logged["sha256"]:
        fault = "is not the one of its audit log"
    if fault:
        raise RefusedError(
            f"the hospital's privacy ledger {fault}: bring back the newest {LEDGER}; an older one "
            "would let the same privacy be spent again"
        )
