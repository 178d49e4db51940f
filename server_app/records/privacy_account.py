"""Differential privacy as the server sees it: what each site says it has spent."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fedsilo.models.contract.errors import EpsilonSpentError, SiteError
from fedsilo.models.contract.messages import DP_EPSILON
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.promises import statistics_noise
from fedsilo.strategies.loop.ask import TooFewSitesError
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

_OF = (
    "each patient of a site: 'epsilon' bounds how well anybody who has all that the site sent in "
    "this run, and knows all other patients, can say whether one patient's record was in the "
    "training data"
)
_UNBOUNDED = (
    "; this run is made for sites that trust the server, so that what 'leaves each site' lists "
    "in addition to weights, class means and prototypes has no noise and is not bounded"
)
_SIMULATED = (
    "; this is a simulation: noise is drawn from the seed and measurements have none, so that it "
    "protects nobody"
)
_NO_NOISE = (
    f"arrays came without '{DP_EPSILON}', so perhaps without noise; server and site run different "
    "versions of fedsilo"
)
_ROUNDING = 1 + 1e-6


class PrivacyHook(Hook):
    """Keeps what each site says it has spent, and ends a run well when one may spend no more.

    A site enters what it spends in its own ledger before it trains, and refuses what would bring
    it above a cap: the count is the site's, also where messages were lost on the way.
    """

    name = "privacy"

    def __init__(self, common: CommonSettings) -> None:
        self.common = common
        self.spent_by: dict[str, float] = {}

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Refuse arrays that come without a word on what they cost, and a cost above the cap.

        A site that counts refuses to go above the run's cap, so one that says so does not.
        """
        if reply.arrays and DP_EPSILON not in reply.metrics:
            return _NO_NOISE
        said, cap = float(reply.metrics.get(DP_EPSILON, 0.0)), self.common.max_epsilon
        if cap and said > cap * _ROUNDING:
            return f"metric '{DP_EPSILON}' is {said:g}, above the run's 'max-epsilon' {cap:g}"
        return None

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Take what each site says; a lost ledger does not lower it."""
        for site, reply in replies.items():
            said = float(reply.metrics.get(DP_EPSILON, 0.0))
            self.spent_by[site] = max(said, self.spent(site))

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Accept a site's refusal to spend more as the end of a run that has trained something."""
        if isinstance(error, TooFewSitesError) and EpsilonSpentError.code in error.codes:
            ends = f"the run ends after round {state.round} of {self.common.rounds}"
            return f"{ends}: {error.reasons}" if state.round else None
        return None

    def state(self) -> Any:
        """Return what sites have spent."""
        return self.spent_by

    def restore(self, state: Any) -> None:
        """Take back what ``state`` returned."""
        self.spent_by = dict(state)

    def spent(self, site: str) -> float:
        """Return the epsilon that a site has spent so far."""
        return self.spent_by.get(site, 0.0)

    def guarantee(self, participants: Participants) -> dict[str, Any]:
        """Return what privacy.json guarantees: of the site that spent most, and of each."""
        common = self.common
        sites = {site: self.spent(site) for site in participants.sites()}
        simulated = any(facts.simulated for facts in participants.facts.values())
        trusted = common.trust == CommonSettings.trust
        return {
            "epsilon": max(sites.values(), default=0.0),
            "delta": common.delta,
            "sample-clip-norm": common.sample_clip_norm,
            "noise-multiplier": common.noise_multiplier,
            "statistics-noise": statistics_noise(common),
            "accountant": f"RDP (dp-accounting {version('dp-accounting')})",
            "mechanism": "DP-SGD with Poisson sampling; group norm in place of batch norm",
            "sites": sites,
            "of": _OF + (_UNBOUNDED if trusted else "") + (_SIMULATED if simulated else ""),
        }
