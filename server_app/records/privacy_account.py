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
from fedsilo.strategies.loop.asking import TooFewSitesError
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

_OF = (
    "all arrays that one site sends in this run: 'epsilon' bounds how well they are distinguished "
    "from messages without the site's contribution (a zero update), 'epsilon-of-a-change' from "
    "those with any other data of the site, one patient's or all (as with half the noise). Label "
    "counts, measurements, seconds, fingerprints and errors, which 'leaves each site' lists, leave "
    "without noise and are not bounded"
)
_NO_NOISE = (
    f"arrays came without '{DP_RELEASES}', so perhaps without noise; server and site run different "
    "versions of fedsilo"
)
_SIMULATED = "; this is a simulation, whose noise is drawn from the seed: it protects nobody"


class PrivacyHook(Hook):
    """Counts each site's noisy messages and ends the run before one has spent too much.

    A site's ledger also counts messages that were lost on the way. Its count is therefore taken
    where it is higher, but never above what the server has asked the site for: one site's word
    could end the run. ``asked`` is written before messages go out, since a server that is killed
    asks again for what its checkpoint does not know.

    Args:
        common: the run's settings, with noise.
        journal: the file of ``asked``.
    """

    name = "privacy"

    def __init__(self, common: CommonSettings, journal: Path) -> None:
        self.common = common
        self.journal = journal
        self.releases: dict[str, int] = {}
        self.asked = self._journal()  # empty in a new run

    def arrays_asked(self, round_: int, phase: str, sites: list[str]) -> None:
        """Count what each site is asked for, and write it down."""
        if sites:
            self.asked |= {site: self.asked.get(site, 0) + 1 for site in sites}
            write_atomically(self.journal, json.dumps(self.asked, indent=2) + "\n")

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Refuse arrays whose noise is not reported, and a count above what was asked for."""
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
        """Take each site's count; a lost ledger does not lower it."""
        for site, reply in replies.items():
            reported, known = reply.metrics.get(DP_RELEASES), self.releases.get(site, 0)
            sent = bool(reply.arrays)
            self.releases[site] = max(int(reported or 0), known + sent)

    def why_stop(self, state: State, ahead: Callable[[], Mapping[str, int]]) -> str | None:
        """Name a site that the next round would bring above 'max-epsilon', if there is one.

        Raises:
            SettingError: nothing has been trained, and the first round is too much already.
        """
        common, cap = self.common, self.common.max_epsilon
        if not cap:
            return None
        coming = ahead()
        if not state.round:
            # A method that sends arrays only later is better refused now than after its training
            first = self._epsilon(max([1, *coming.values()]))
            if first > cap:
                raise SettingError(
                    f"epsilon of one round is {first:.4g} and 'max-epsilon' is {cap:g}: raise "
                    "'noise-multiplier' or 'max-epsilon'"
                )
        for site, releases in coming.items():
            before = self.releases.get(site, 0)
            if releases and (after := self._epsilon(before + releases)) > cap:
                return (
                    f"the run ends after round {state.round} of {common.rounds}: site {site} has "
                    f"spent epsilon {self._epsilon(before):.4g} at delta {common.delta:g}, the "
                    f"next round would make it {after:.4g}, above 'max-epsilon' {cap:g}"
                )
        return None

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Accept a site's refusal to spend more as the end of a run that has trained something.

        A site may know more than the server: messages that were lost, or a limit of its own.
        """
        if isinstance(error, TooFewSitesError) and EpsilonSpentError.code in error.codes:
            ends = f"the run ends after round {state.round} of {self.common.rounds}"
            return f"{ends}: {error.reasons}" if state.round else None
        return None

    def state(self) -> Any:
        """Return the counts."""
        return {"releases": self.releases, "asked": self.asked}

    def restore(self, state: Any) -> None:
        """Take the counts back; where the journal knows of more that was asked, it counts."""
        self.releases, self.asked = dict(state["releases"]), dict(state["asked"])
        for site, count in self._journal().items():
            self.asked[site] = max(count, self.asked.get(site, 0))

    def spent(self, site: str) -> float:
        """Return the epsilon that a site has spent so far."""
        return self._epsilon(self.releases.get(site, 0))

    def guarantee(self, participants: Participants) -> dict[str, Any]:
        """Return what privacy.json guarantees: of the site that spent most, and of each."""
        common = self.common
        sites = {site: self._account(self.releases.get(site, 0)) for site in participants.sites()}
        simulated = any(facts.simulated for facts in participants.facts.values())
        return {
            **self._account(max((spent["releases"] for spent in sites.values()), default=0)),
            "delta": common.delta,
            "clip-norm": common.clip_norm,
            "noise-multiplier": common.noise_multiplier,
            "accountant": f"RDP (dp-accounting {version('dp-accounting')})",
            "sites": sites,
            "of": _OF + (_SIMULATED if simulated else ""),
        }

    def _account(self, releases: int) -> dict[str, Any]:
        z, delta = self.common.noise_multiplier, self.common.delta
        return {
            "epsilon": self._epsilon(releases),
            "epsilon-of-a-change": epsilon_of_a_change(z, releases, delta),
            "releases": releases,
        }

    def _epsilon(self, releases: int) -> float:
        return epsilon(self.common.noise_multiplier, releases, self.common.delta)

    def _journal(self) -> dict[str, int]:
        """Return what the journal says was asked for; nothing if it is damaged or missing."""
        try:
            found = json.loads(self.journal.read_text())
            return {str(site): int(count) for site, count in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
