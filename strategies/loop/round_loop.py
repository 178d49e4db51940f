"""The round loop: run a method's rounds, choose sites, call hooks, end early, resume.

``strategies.loop.method`` defines a method's round. ``strategies.loop.asking`` asks sites and
checks their replies.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from flwr.serverapp import Grid

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import SUMS, CommonSettings
from fedsilo.models.privacy.secure_sum import needed_sites
from fedsilo.strategies.loop.asking import GridAsk, Session
from fedsilo.strategies.loop.hooks import Hook, Hooks
from fedsilo.strategies.loop.method import Method, State
from fedsilo.strategies.loop.robust import why_too_few
from fedsilo.strategies.loop.secure_ask import SecureAsk
from fedsilo.strategies.meeting.participants import meet_latecomers
from fedsilo.strategies.wire.compressed import compression_of
from fedsilo.strategies.wire.records import to_record
from fedsilo.strategies.wire.reply import Spill


class RoundLoop:
    """Runs a method's rounds over the sites of a grid."""

    def __init__(self, method: Method, hooks: Sequence[Hook] = (), run_dir: str = "") -> None:
        self.method = method  # defines the rounds
        self.hooks = Hooks(hooks)  # called at the events of each round
        self.run_dir = run_dir
        # The state after the newest round; None until the first use of a new run
        self.state: State | None = None
        self.stopped = ""  # the reason why a hook ended the run early; empty if none did

    def start(self, grid: Grid, num_rounds: int, timeout: float = 3600.0) -> State:
        """Run the remaining rounds, let the sites measure the model, and return the final state.

        A resumed run continues after ``self.state``.

        Args:
            grid: connects the server with the sites.
            num_rounds: the last round.
            timeout: seconds to wait for the replies of a phase.

        Raises:
            SiteError: too few sites gave a usable reply in a phase.
        """
        state = self.current()
        session = self.session(grid, timeout)
        self.hooks.call("run_started", state, self.method.participants, num_rounds)
        while not self._is_over(state, num_rounds):
            try:
                state = self.run_round(session)
            except SiteError as error:
                # A hook may end the run at a failed round, for one because epsilon is spent
                self.stopped = self.hooks.first("why_end", state, error) or ""
                if not self.stopped:
                    raise
        self.evaluate(session)
        self.hooks.call("run_ended", self.current())
        return self.current()

    def session(self, grid: Grid, timeout: float = 3600.0) -> Session:
        """Build the parts that all questions of a run over ``grid`` share."""
        method, pooled = self.method, self.method.participants.figures()
        return Session(
            grid,
            method.common,
            method.participants,
            self.hooks,
            self.run_dir,
            timeout,
            dict(self.current().kept),
            to_record(vars(pooled)) if pooled else None,
            compression_of(method.common),
        )

    def run_round(self, session: Session) -> State:
        """Run the round after the current state; store and return its state."""
        state, method = self.current(), self.method
        round_ = state.round + 1
        if method.capabilities.late_join:
            self._let_latecomers_in(session, round_)
        known = dict(session.kept)
        spill = Spill(session.run_dir)
        sites = sampled_sites(self.method.common, self.method.participants.sites(), round_)
        ask = GridAsk(session, round_, sites, spill)
        try:
            secure = method.common.secure_aggregation != "none"
            after = method.round(state, SecureAsk(ask, method.common) if secure else ask)
            # A state may store the model under a prefix, but sites reply with its plain names
            ask.measure_updates({**method.model(after), **after.arrays})
        except SiteError:
            # A failed round must not count as state that sites keep, because it is run again
            session.kept = known
            raise
        finally:
            spill.close()
        kept = dict(sorted(session.kept.items()))
        self.state = replace(after, round=round_, kept=kept)
        self.hooks.call("round_ended", self.state)
        return self.state

    def evaluate(self, session: Session) -> None:
        """Let all sites measure the current model."""
        state = self.current()
        sites, common = self.method.participants.sites(), self.method.common
        ask = GridAsk(session, state.round, sites, Spill(), ends=True)
        self.method.evaluate(state, SecureAsk(ask, common) if common.trust == SUMS else ask)

    def current(self) -> State:
        """Return the state after the newest round, or the method's initial state before round 1."""
        if self.state is None:
            self.state = self.method.initial_state()
        return self.state

    def _is_over(self, state: State, num_rounds: int) -> bool:
        if state.round >= num_rounds or self.method.why_finished(state) or self.stopped:
            return True
        self.stopped = self.hooks.first("why_finished", state) or ""
        return bool(self.stopped)

    def _let_latecomers_in(self, session: Session, round_: int) -> None:
        """Add sites that connected after the last round to the run."""
        known = session.participants
        participants, refused = meet_latecomers(session.grid, known)
        joined = [s for s in participants.sites() if participants.nodes[s] != known.nodes.get(s)]
        session.participants = self.method.participants = participants
        for reason in refused:
            self.hooks.call("site_failed", round_, "hello", "unknown", reason)
        if joined:
            self.hooks.call("participants_changed", round_, participants, joined)


def sampled_sites(common: CommonSettings, sites: Sequence[str], round_: int) -> list[str]:
    """Return the sites that ``round_`` may ask, sorted: 'server.sites-per-round', or all if 0.

    The draw depends only on the seed and the round.
    """
    count = common.sites_per_round
    if not count or count >= len(sites):
        return sorted(sites)
    rng = np.random.default_rng(derive_seed(common.seed, "sites-per-round", round_))
    chosen = rng.choice(len(sites), count, replace=False)
    return sorted(sorted(sites)[place] for place in chosen)


def refuse_site_count(common: CommonSettings, sites: int) -> None:
    """Refuse settings that do not fit the number of sites.

    Raises:
        SettingError: 'server.sites-per-round', 'server.aggregation' or 'secure.aggregation' need
            more sites, or the threshold or bits of secure aggregation do not fit.
    """
    if common.sites_per_round > sites:
        raise SettingError(
            f"setting 'server.sites-per-round' is {common.sites_per_round}, more than there are "
            f"sites ({sites}): lower it, or set it to 0 for all"
        )
    asked = common.sites_per_round or sites
    if reason := why_too_few(common, asked):
        raise SettingError(reason)
    if common.secure_aggregation != "none":
        needed_sites(common, asked)
