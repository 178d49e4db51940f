"""Differential privacy at the server: the epsilon that each site reports to have spent."""

from collections.abc import Mapping
from typing import Any

from fedsilo.core.errors import EpsilonSpentError, SiteError
from fedsilo.core.messages import DP_EPSILON
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.versions import installed_version
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
    """Stores the epsilon that each site reports, and ends the run when a site's cap is reached.

    A site records its spending in its own ledger before it trains, and refuses to exceed a cap. So
    the site's own total stays right even if messages are lost.
    """

    name = "privacy"

    def __init__(self, common: CommonSettings) -> None:
        self.common = common
        self.spent_by: dict[str, float] = {}

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Return the reason to refuse a site's reply, or None to accept it.

        A reply is refused in two cases:

        - The reply has arrays, but does not state the epsilon that the site has spent. The arrays
          may then have no noise.
        - The stated epsilon exceeds the run's cap 'privacy.max-epsilon' by more than a millionth of
          the cap. The site's record of spent epsilon is then wrong. A cap of 0 means no cap.
        """
        if reply.arrays and DP_EPSILON not in reply.metrics:
            return _NO_NOISE
        # 0 means no cap. The factor allows for rounding in a site's own arithmetic
        said, cap = float(reply.metrics.get(DP_EPSILON, 0.0)), self.common.max_epsilon
        if cap and said > cap * _ROUNDING:
            return (
                f"metric '{DP_EPSILON}' is {said:g}, above the run's 'privacy.max-epsilon' {cap:g}"
            )
        return None

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Store the epsilon that each site has reported, unless a larger one is stored already.

        If a reply has no epsilon, 0 is taken. ``round_`` and ``phase`` are not used.
        """
        for site, reply in replies.items():
            said = float(reply.metrics.get(DP_EPSILON, 0.0))
            self.spent_by[site] = max(said, self.spent(site))

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Return the reason to end the run without an error once a site's epsilon is spent.

        The result is None if the run must fail instead. There is a reason only if three conditions
        hold: ``error`` is a TooFewSitesError, at least one site failed because its epsilon is
        spent, and a round has finished. Before the first finished round there is no model to keep.

        Args:
            state: the state after the last finished round.
            error: the error that would otherwise fail the run.
        """
        # Before the first round a refusal is an error: the run has trained nothing to keep
        if not state.round or not isinstance(error, TooFewSitesError):
            return None
        if EpsilonSpentError.code not in error.codes:
            return None
        ends = f"the run ends after round {state.round} of {self.common.rounds}"
        return f"{ends}: {error.reasons}"

    def state(self) -> Any:
        """Return the epsilon that each site has spent, by site."""
        return self.spent_by

    def restore(self, state: Any) -> None:
        """Restore the mapping that ``state`` returned."""
        self.spent_by = dict(state)

    def spent(self, site: str) -> float:
        """Return the epsilon that a site has spent so far, or 0 if it has not reported any."""
        return self.spent_by.get(site, 0.0)

    def guarantee(self, participants: Participants) -> dict[str, Any]:
        """Return the entry "guarantee" of privacy.json, which describes the differential privacy.

        The keys are:

        - "sites": site -> its spent epsilon, and "epsilon": the largest of these, or 0,
        - "of": a sentence that says what epsilon protects, and with which limits,
        - "delta", "sample-clip-norm", "noise-multiplier" and "statistics-noise": numbers from the
          settings,
        - "accountant" and "mechanism": how epsilon is computed, and how noise is added.

        Args:
            participants: the sites of the run.
        """
        common = self.common
        sites = {site: self.spent(site) for site in participants.sites()}
        bound = _OF
        if common.trust == CommonSettings.trust:
            bound += _UNBOUNDED
        if any(facts.simulated for facts in participants.facts.values()):
            bound += _SIMULATED
        return {
            "epsilon": max(sites.values(), default=0.0),
            "delta": common.delta,
            "sample-clip-norm": common.sample_clip_norm,
            "noise-multiplier": common.noise_multiplier,
            "statistics-noise": statistics_noise(common),
            "accountant": f"RDP (dp-accounting {installed_version('dp-accounting')})",
            "mechanism": "DP-SGD with Poisson sampling; group norm in place of batch norm",
            "sites": sites,
            "of": bound,
        }
