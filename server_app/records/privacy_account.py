"""Differential privacy as the server sees it: what each site has spent, and when it is enough."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import EpsilonSpentError, SettingError, SiteError
from fedsilo.models.contract.messages import DP_RELEASES
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.accountant import epsilon, epsilon_of_a_change
from fedsilo.server_app.records.summary import NO_PRIVACY
from fedsilo.strategies.loop.asking import TooFewSitesError
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

_OF = (
    "the arrays of all replies of this run together, of one site: 'epsilon' tells them from "
    "messages without the site's contribution (an update of zero), 'epsilon-of-a-change' from "
    "those of any other data of the site, be it one patient's or all (as of half the noise). Of "
    "the arrays only: label counts, measurements, seconds, fingerprints and errors, which 'leaves "
    "each site' names, leave without noise and are not bounded"
)
_OF_SUMS = (
    "the sums of all rounds of this run together: 'epsilon' tells them from sums without one "
    "site's contribution, 'epsilon-of-a-change' from those with any other data of that site; "
    "another site, which knows its own part of the noise, faces that much less. Label counts, "
    "measurements, seconds, fingerprints and errors, which 'leaves each site' names, are not "
    "bounded"
)
_NO_NOISE = (
    f"arrays came without '{DP_RELEASES}', so perhaps without noise; server and site run different "
    "versions of fedsilo"
)
_SECURE_NOISE = {
    "own": "each site adds the whole of it: it holds whoever reads the site's weights",
    "spread": (
        "each site adds a part and 'secure-threshold' sites the whole: it holds of the sum, "
        "against a server that follows the protocol, if so many sites add theirs; of one site's "
        "weights, which are masked, it says nothing"
    ),
}
_LOST = 6  # messages of two rounds, of which none has more than three
_SIMULATED = "; this is a simulation, whose noise is drawn from the seed: who knows it sees through"


class PrivacyHook(Hook):
    """Counts each site's noisy messages and ends the run before one has spent too much.

    A site counts in its ledger also what was lost on its way, so its word is taken where it is
    higher, but never above what the server has asked it for: one site's word could end the run.
    ``asked`` is therefore written before messages go out, as a server that is killed asks again for
    what its checkpoint does not know.
    """

    name = "privacy"

    def __init__(self, common: CommonSettings, journal: Path | None = None) -> None:
        self.common = common
        self.journal = journal
        self.releases: dict[str, int] = {}
        self.asked = self._written()  # of a new run there is nothing yet

    def arrays_asked(self, round_: int, phase: str, sites: list[str]) -> None:
        """Count what each site is asked for, and write it down."""
        if not (self.common.noise_multiplier and sites):
            return
        self.asked |= {site: self.asked.get(site, 0) + 1 for site in sites}
        if self.journal:
            write_atomically(self.journal, json.dumps(self.asked, indent=2) + "\n")

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Refuse arrays without a word of noise, and a count above what was asked for."""
        if not self.common.noise_multiplier:
            return None
        reported = reply.metrics.get(DP_RELEASES)
        if reported is None:
            return _NO_NOISE if reply.arrays else None
        if reported <= (asked := self.asked.get(reply.site, 0)):
            return None
        return (
            f"metric '{DP_RELEASES}' is {reported:g}, and the server has asked for {asked} noisy "
            "messages: if the site's ledger is of an earlier run of this name, choose another "
            "'run-name'"
        )

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Take what each site counts; a ledger that was lost does not make it less."""
        if not self.common.noise_multiplier:
            return
        for site, reply in replies.items():
            reported, known = reply.metrics.get(DP_RELEASES), self.releases.get(site, 0)
            sent = bool(reply.arrays)
            self.releases[site] = max(int(reported or 0), known + sent)

    def why_stop(self, state: State, ahead: Callable[[], Mapping[str, int]]) -> str | None:
        """Name a site that the next round would bring above 'max-epsilon'.

        Raises:
            SettingError: nothing has been trained, and the first round is too much already.
        """
        cap = self.common.max_epsilon
        if not (cap and self.common.noise_multiplier):
            return None
        coming = ahead()
        if not state.round:
            # A method whose arrays come late is better refused now than when it has trained
            first = self._epsilon(max([1, *coming.values()]))
            if first > cap:
                raise SettingError(
                    f"epsilon of one round is {first:.4g} and 'max-epsilon' is {cap:g}: raise "
                    "'noise-multiplier' or 'max-epsilon'"
                )
        for site, releases in coming.items():
            before = self.releases.get(site, 0)
            if releases and (after := self._epsilon(before + releases)) > cap:
                return self._reason_to_stop(state, site, before, after)
        return None

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Take a site's refusal to spend more as the end of a run that has trained something.

        A site may know of more than the server: messages that were lost, or a cap of its own.
        """
        if not (isinstance(error, TooFewSitesError) and EpsilonSpentError.code in error.codes):
            return None
        if not (state.round and self.common.noise_multiplier):
            return None
        return f"the run ends after round {state.round} of {self.common.rounds}: {error.reasons}"

    def state(self) -> Any:
        """Return the counts."""
        return {"releases": self.releases, "asked": self.asked}

    def restore(self, state: Any) -> None:
        """Take them back; a checkpoint of before there was this hook has none.

        One of before the server counted what it asks for has releases alone: the site may know of
        two more rounds, as many as there are checkpoints.
        """
        known = dict(state or {})
        self.releases = dict(known.get("releases", known))
        self.asked = dict(known.get("asked", {s: n + _LOST for s, n in self.releases.items()}))
        for site, count in self._written().items():
            self.asked[site] = max(count, self.asked.get(site, 0))

    def _written(self) -> dict[str, int]:
        """Return what the journal says that was asked for; damaged or missing it says nothing."""
        try:
            found = json.loads(self.journal.read_text()) if self.journal else {}
            return {str(site): int(count) for site, count in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def spent(self, site: str) -> float | None:
        """Return the epsilon that a site has spent so far; None without differential privacy."""
        return self._epsilon(self.releases.get(site, 0)) if self.common.noise_multiplier else None

    def guarantee(self, participants: Participants) -> str | dict[str, Any]:
        """Return what privacy.json guarantees: of the site that spent most, and of each."""
        if not self.common.noise_multiplier:
            return NO_PRIVACY
        sites = {site: self._spent(self.releases.get(site, 0)) for site in participants.sites()}
        simulated = any(facts.simulated for facts in participants.facts.values())
        secure = self.common.secure_aggregation != "none"
        spread = secure and self.common.secure_noise == "spread"
        return {
            **self._spent(max((spent["releases"] for spent in sites.values()), default=0)),
            "delta": self.common.delta,
            "clip-norm": self.common.clip_norm,
            "noise-multiplier": self.common.noise_multiplier,
            "accountant": f"RDP (dp-accounting {version('dp-accounting')})",
            "sites": sites,
            **({"noise": _SECURE_NOISE[self.common.secure_noise]} if secure else {}),
            "of": (_OF_SUMS if spread else _OF) + (_SIMULATED if simulated else ""),
        }

    def _spent(self, releases: int) -> dict[str, Any]:
        z, delta = self.common.noise_multiplier, self.common.delta
        return {
            "epsilon": self._epsilon(releases),
            "epsilon-of-a-change": epsilon_of_a_change(z, releases, delta),
            "releases": releases,
        }

    def _epsilon(self, releases: int) -> float:
        return epsilon(self.common.noise_multiplier, releases, self.common.delta)

    def _reason_to_stop(self, state: State, site: str, before: int, after: float) -> str:
        common = self.common
        return (
            f"the run ends after round {state.round} of {common.rounds}: site {site} has spent "
            f"epsilon {self._epsilon(before):.4g} at delta {common.delta:g}, the next round would "
            f"make it {after:.4g}, above 'max-epsilon' {common.max_epsilon:g}"
        )
