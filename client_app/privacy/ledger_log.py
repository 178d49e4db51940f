"""The hospital's ledger and its audit log check each other.

Each line of the audit log says how far the ledger was. A ledger that is behind the log is an older
copy that somebody put back, or was removed: by it, patients' privacy would be spent twice.
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
from fedsilo.datasets.io.regular_files import read_regular
from fedsilo.models.contract.errors import RefusedError


def ledger_mark(context: Context) -> LedgerMark | None:
    """Count and digest the hospital's ledger of all runs; None if it has none yet.

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
    """Let a message be answered, unless the ledger is older than the audit log says.

    Raises:
        RefusedError: it is; names both counts.
    """
    context = answering.context
    with refusing_as(own_name(context)):
        refuse_older_ledger(log_path(context, answering.rules), context)
    yield


def refuse_older_ledger(log: Path, context: Context) -> None:
    """Refuse a ledger that is behind the last line of the audit log.

    Raises:
        RefusedError: the ledger has fewer releases than the log says, or as many but other ones.
        CheckpointError: the ledger is damaged.
    """
    logged = last_ledger(log)  # before the ledger is read, because messages side by side spend too
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
