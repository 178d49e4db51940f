"""What a site has spent of its patients' privacy: ledgers that are written before anything leaves.

A run's ledger is in the folder of the site's states of the run. It counts every private step, also
one that a server lost and asks for again. A hospital with a cap of its own has another one, of all
its runs: a server chooses a run's name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveFloat

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import EpsilonSpentError
from fedsilo.models.privacy.accountant import SPENT, Releases, epsilon

LEDGER = "privacy-ledger.json"


@dataclass(frozen=True)
class _Content:
    releases: list[tuple[PositiveFloat, Annotated[float, Field(gt=0, le=1)], NonNegativeInt]]


@dataclass(frozen=True)
class Ledger:
    """What has been spent in a run, or in all runs of a hospital, and what may be."""

    path: Path  # of its file
    cap: float  # on epsilon, whatever servers ask, or 0 for none
    delta: float  # at which it holds
    # A run's ledger has the hospital's own here, if there is one: it counts the same
    hospital: Self | None = None
    of_all_runs: bool = False  # whether it is the hospital's own

    def spend(self, releases: Releases) -> None:
        """Enter releases here and in the hospital's own ledger, before they are made.

        Messages that are answered side by side wait for each other here.

        Raises:
            EpsilonSpentError: they would bring epsilon above a cap; nothing is entered.
            CheckpointError: a ledger is damaged.
        """
        with (self.hospital or self)._file().locked():
            self._enter(releases)

    def releases(self) -> Releases:
        """Return what has been spent.

        Raises:
            CheckpointError: the ledger is damaged.
        """
        return {(noise, rate): n for noise, rate, n in self._file().read(_Content([])).releases}

    def epsilon(self) -> float:
        """Return the epsilon of what has been spent, at the ledger's delta."""
        return epsilon(self.releases(), self.delta)

    def _enter(self, more: Releases) -> None:
        before = self.releases()
        after = {kind: before.get(kind, 0) + more.get(kind, 0) for kind in {**before, **more}}
        if self.cap and not (spent := epsilon(after, self.delta)) <= self.cap:
            raise self._spent(epsilon(before, self.delta), spent)
        if self.hospital:
            self.hospital._enter(more)
        self._file().write(_Content([(*kind, count) for kind, count in sorted(after.items())]))

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
            "bring it back, or choose another 'run-name'; what was spent in this run is known by "
            "nothing else"
        )
        if self.of_all_runs:
            what = f"the hospital's privacy ledger {self.path.name}"
            lost = "bring it back; what was spent in all runs is known by nothing else"
        return OwnFile(self.path, _Content, what, lost)
