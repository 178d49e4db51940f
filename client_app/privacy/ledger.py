"""The epsilon that a site has spent on its patients, in ledgers written before anything leaves.

A run's ledger is in the folder of the site's states in that run. It counts every private step, even
one whose reply the server lost and asks for again. A hospital with its own cap has a second ledger
over all its runs, because a server could choose a new run name each time.

The hospital's ledger and its audit log check each other: each line of the log records the ledger's
state. A ledger behind the log was removed, or is an older copy that somebody restored. With such a
ledger the same privacy would be spent twice.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from flwr.app import Context
from pydantic import Field, NonNegativeInt, PositiveFloat

from fedsilo.client_app.site.audit_log import LedgerMark, last_ledger
from fedsilo.client_app.site.identity import own_name, prefix_refusals
from fedsilo.client_app.site.node import Answering, own_folder
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.client_app.site.policy import log_path
from fedsilo.core.errors import EpsilonSpentError, RefusedError
from fedsilo.core.files.atomic_files import read_regular
from fedsilo.models.privacy.accountant import SPENT, Releases, epsilon

LEDGER = "privacy-ledger.json"


@dataclass(frozen=True)
class _Content:
    releases: list[tuple[PositiveFloat, Annotated[float, Field(gt=0, le=1)], NonNegativeInt]]


@dataclass(frozen=True)
class Ledger:
    """The number of releases in one run, or in a hospital's runs, and a cap on their epsilon."""

    path: Path  # the ledger's file
    cap: float  # the cap on epsilon, independent of the server; 0 means no cap
    delta: float  # the delta that epsilon is computed for
    # A run's ledger points to the hospital's own ledger, if there is one, which counts the same
    hospital: Self | None = None
    of_all_runs: bool = False  # whether this is the hospital's own ledger

    def spend(self, releases: Releases) -> None:
        """Add releases to this ledger and to the hospital's ledger, if there is one.

        A release is one noisy result, such as one DP-SGD step. The caller makes it only afterwards.
        The ledgers are locked during the call, so messages that are answered at the same time wait
        for each other.

        Args:
            releases: (noise multiplier, sampling rate) -> number of releases.

        Raises:
            EpsilonSpentError: epsilon would exceed a cap. Neither ledger changes.
            CheckpointError: a ledger is damaged, or cannot be written.
        """
        # One lock for both ledgers, so that no other run spends between the two entries
        with (self.hospital or self)._file().lock():
            self._enter(releases)

    def releases(self) -> Releases:
        """Return the releases so far: (noise multiplier, sampling rate) -> number; empty if none.

        Raises:
            CheckpointError: the ledger is damaged.
        """
        stored = self._file().read(_Content([]))
        return {(noise, rate): number for noise, rate, number in stored.releases}

    def epsilon(self) -> float:
        """Return the epsilon of all releases so far, at the ledger's ``delta``; 0 without releases.

        Raises:
            CheckpointError: the ledger is damaged.
        """
        return epsilon(self.releases(), self.delta)

    def _enter(self, more: Releases) -> None:
        """Enter releases in the hospital's ledger, if there is one, and then in this ledger.

        A release is one noisy result. The caller holds the lock. This ledger's cap on epsilon is
        checked first, then the hospital's. If either cap would be exceeded, nothing is entered in
        any ledger. A cap of 0 means no cap.

        Args:
            more: the releases to add: (noise multiplier, sampling rate) -> number.

        Raises:
            EpsilonSpentError: epsilon would exceed this ledger's cap or the hospital's.
            CheckpointError: a ledger is damaged, or cannot be written.
        """
        before = self.releases()
        after = dict(before)
        for kind, number in more.items():
            after[kind] = after.get(kind, 0) + number
        if self.cap:
            # The whole history is composed again, because epsilons of single releases do not add up
            spent = epsilon(after, self.delta)
            if not spent <= self.cap:  # not '>', so that NaN is refused too
                raise self._spent(epsilon(before, self.delta), spent)
        # The hospital's first: if it refuses, nothing is entered in this one
        if self.hospital:
            self.hospital._enter(more)
        content = [(noise, rate, after[noise, rate]) for noise, rate in sorted(after)]
        self._file().write(_Content(content))

    def _spent(self, before: float, after: float) -> EpsilonSpentError:
        have, whose = "this run has", "site's"
        if self.of_all_runs:
            have, whose = "all runs have", "hospital's own"
        return EpsilonSpentError(
            f"{SPENT}: {have} spent {before:.4g} at delta {self.delta:g}, and what the message "
            f"asks for would make it {after:.4g}, above the {whose} 'max-epsilon' {self.cap:g}; "
            "nothing left the site"
        )

    def _file(self) -> OwnFile[_Content]:
        what = f"the privacy ledger {self.path}"
        lost = (
            "bring it back, or choose another 'run.name'; nothing else records what was spent in "
            "this run"
        )
        if self.of_all_runs:
            what = f"the hospital's privacy ledger {self.path.name}"
            lost = "bring it back; nothing else records what was spent in all runs"
        return OwnFile(self.path, _Content, what, lost)


def ledger_mark(context: Context) -> LedgerMark | None:
    """Return the state of the hospital's privacy ledger of all runs, for the audit log.

    The state is a mapping: "releases" -> the number of noisy results so far, and "sha256" -> the
    SHA-256 of the ledger's file, in hexadecimal. Returns None if the site has no 'state-dir' or no
    ledger yet.

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
def require_newest_ledger(answering: Answering) -> Iterator[None]:
    """Run the block, which answers a message, only if the ledger is not older than the audit log.

    Each line of the log has the state that the hospital's privacy ledger had. An older ledger would
    let the same epsilon be spent again. The check is made once, before the block
    (``refuse_older_ledger``). The text of a refusal begins with the site's name.

    Raises:
        RefusedError: the ledger is older than the audit log's last line or is another ledger, or
            the log cannot be read.
        CheckpointError: the ledger is damaged.
    """
    context = answering.context
    with prefix_refusals(own_name(context)):
        refuse_older_ledger(log_path(context, answering.rules), context)
    yield


def refuse_older_ledger(log: Path, context: Context) -> None:
    """Check that the privacy ledger is not older than the last line of the audit log.

    Each line of the log has the state of the hospital's ledger of all runs: the number of releases
    (noisy results) and the digest of the file. A missing ledger counts as 0 releases. The check
    passes if the log is empty, or if its last line has no such state. A missing log is created
    empty.

    Args:
        log: the audit log's path.
        context: the node's context.

    Raises:
        RefusedError: the ledger has fewer releases than the log's last line, it has the same number
            but another digest, or the log cannot be read.
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
