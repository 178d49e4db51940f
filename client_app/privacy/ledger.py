"""What a site has spent of its patients' privacy: ledgers that are written before anything leaves.

A run's ledger is beside the site's states of the run. It counts every private step, also one that a
server lost and asks for again. A hospital with a cap of its own has another one, of all its runs: a
server chooses a run's name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import EpsilonSpentError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.accountant import SPENT, Releases, epsilon

LEDGER = "privacy-ledger.json"
_NONE: Releases = {}


@dataclass(frozen=True)
class OwnCap:
    """A hospital's own cap: what all its runs together may reveal, whatever servers ask.

    Attributes:
        ledger: counts the releases of all runs.
        most: the cap on epsilon.
        delta: at which it holds.
    """

    ledger: Path
    most: float
    delta: float


@dataclass(frozen=True)
class Account:
    """What one site spends in a run.

    Attributes:
        ledger: of the run.
        settings: of the run, with the hospital's own limits over them.
        cap: the hospital's own over all its runs, if it has one.
    """

    ledger: Path
    settings: CommonSettings
    cap: OwnCap | None

    def spend(self, releases: Releases) -> None:
        """Enter releases in the run's ledger and the hospital's own, before they are made.

        Messages that are answered side by side wait for each other here.

        Raises:
            EpsilonSpentError: they would bring epsilon above a cap; nothing is entered.
            CheckpointError: a ledger is damaged.
        """
        settings, cap = self.settings, self.cap
        with (_own(cap.ledger) if cap else _of_run(self.ledger)).locked():
            of_run = _of_run(self.ledger).read(_parsed, _NONE)
            _refuse_spent(
                of_run, releases, settings.max_epsilon, settings.delta, "this run has", "the site's"
            )
            if cap:
                _enter(cap, releases)
            _of_run(self.ledger).write(_content(_together(of_run, releases)))

    def releases(self) -> Releases:
        """Return what the run's ledger has."""
        return _of_run(self.ledger).read(_parsed, _NONE)

    def epsilon(self) -> float:
        """Return what the run has spent, at its delta."""
        return epsilon(self.releases(), self.settings.delta)


def spend_own(cap: OwnCap, releases: Releases) -> None:
    """Enter releases that belong to no run in the hospital's own ledger; errors as ``spend``."""
    with _own(cap.ledger).locked():
        _enter(cap, releases)


def _enter(cap: OwnCap, releases: Releases) -> None:
    before = read_own_ledger(cap.ledger)
    _refuse_spent(before, releases, cap.most, cap.delta, "all runs have", "the hospital's own")
    _own(cap.ledger).write(_content(_together(before, releases)))


def read_own_ledger(path: Path) -> Releases:
    """Return the releases of all runs of a hospital.

    Raises:
        CheckpointError: the ledger is damaged.
    """
    return _own(path).read(_parsed, _NONE)


def _own(path: Path) -> OwnFile:
    lost = "bring it back; what was spent in all runs is known by nothing else"
    return OwnFile(path, f"the hospital's privacy ledger {path.name}", lost)


def _of_run(path: Path) -> OwnFile:
    lost = (
        "bring it back, or choose another 'run-name'; what was spent in this run is known by "
        "nothing else"
    )
    return OwnFile(path, f"the privacy ledger {path}", lost)


def _together(before: Releases, more: Releases) -> Releases:
    return {kind: before.get(kind, 0) + more.get(kind, 0) for kind in {**before, **more}}


def _content(releases: Releases) -> dict[str, Any]:
    return {"releases": [[*kind, count] for kind, count in sorted(releases.items())]}


def _parsed(content: Any) -> Releases:
    releases = {}
    for noise, rate, count in content["releases"]:
        if not (noise > 0 and 0 < rate <= 1 and type(count) is int and count >= 0):
            raise ValueError("releases")
        releases[float(noise), float(rate)] = count
    return releases


def _refuse_spent(
    before: Releases, more: Releases, cap: float, delta: float, whose: str, of_whom: str
) -> None:
    """Refuse releases that would bring epsilon above ``cap``; 0: no limit.

    Raises:
        EpsilonSpentError: it gives epsilon before and after.
    """
    if not cap or (after := epsilon(_together(before, more), delta)) <= cap:
        return
    raise EpsilonSpentError(
        f"{SPENT}: {whose} spent {epsilon(before, delta):.4g} at delta {delta:g}, and what the "
        f"message asks for would make it {after:.4g}, above {of_whom} 'max-epsilon' {cap:g}; "
        "nothing left the site"
    )
