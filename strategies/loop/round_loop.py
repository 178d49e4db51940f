"""The round loop: run a method's rounds, choose sites, call hooks, end early, resume.

``strategies.loop.method`` defines a method's round. ``strategies.loop.round`` asks sites and checks
their replies.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
from flwr.serverapp import Grid

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.models.privacy.secure_sum import needed_sites
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.hooks import Hook, Hooks
from fedsilo.strategies.loop.method import Method, State
from fedsilo.strategies.loop.robust import why_too_few
from fedsilo.strategies.loop.round import Round
from fedsilo.strategies.loop.secure_ask import SecureAsk
from fedsilo.strategies.meeting.participants import meet_latecomers
from fedsilo.strategies.wire.compressed import compression_of
from fedsilo.strategies.wire.records import to_record
from fedsilo.strategies.wire.reply import Spill


class RoundLoop:
    """Runs a method's rounds over the sites that a grid connects, and the final evaluation."""

    def __init__(self, method: Method, hooks: Sequence[Hook] = (), run_dir: str = "") -> None:
        self.method = method  # defines the rounds
        self.hooks = Hooks(hooks)  # called at the events of each round
        self.run_dir = run_dir
        self.stopped = ""  # the reason why a hook ended the run early; empty if none did

    @cached_property
    def state(self) -> State:
        """The state after the newest finished round.

        Before round 1 this is the method's initial state, which is computed at the first access. To
        resume a run, the caller sets this attribute to the state in the checkpoint.
        """
        state: State = self.method.initial_state()
        return state

    def start(self, grid: Grid, num_rounds: int, timeout: float = 3600.0) -> State:
        """Run the rounds up to ``num_rounds``, let sites measure the model, and return the state.

        The first round is the one after ``self.state``. The sites measure even if no round remains,
        or if the method or a hook ends the run early.

        Args:
            grid: connects the server with the sites.
            num_rounds: the total number of rounds, including those before a resumed run.
            timeout: seconds to wait for the replies of a phase.

        Raises:
            SiteError: too few sites gave a usable reply in a phase, and no hook's ``why_end`` ends
                the run.
        """
        self.connect(grid, timeout)
        self.hooks.call("run_started", self.state, self.method.participants, num_rounds)
        while not self._is_over(num_rounds):
            try:
                self.run_round()
            except SiteError as error:
                # A hook may end the run at a failed round, for example because epsilon is spent
                self.stopped = self.hooks.first("why_end", self.state, error) or ""
                if not self.stopped:
                    raise
        self.evaluate()
        self.hooks.call("run_ended", self.state)
        return self.state

    def connect(self, grid: Grid, timeout: float = 3600.0) -> None:
        """Set the grid and the timeout for all following rounds, without sending a message.

        Values that all these rounds use are computed now, at each call. An example is the pooled
        mean and standard deviation of each table feature.

        Args:
            grid: connects the server with the sites.
            timeout: seconds to wait for the replies of a phase.
        """
        self._grid = grid
        standardisation = None
        pooled = self.method.participants.standardisation()
        if pooled:
            standardisation = to_record(vars(pooled))
        # All rounds of a run share these parts
        self._open_round = partial(
            Round,
            method=self.method,
            hooks=self.hooks,
            grid=grid,
            timeout=timeout,
            run_dir=self.run_dir,
            standardisation=standardisation,
            compression=compression_of(self.method.common),
        )

    def run_round(self) -> None:
        """Run the round after ``self.state``, and store its result as the new state.

        If the method's capability ``late_join`` is True, sites that connected since the last round
        are admitted first. All sites may be asked. With 'server.sites-per-round', only that number
        of sites, drawn at random, may be asked. With secure aggregation the method asks through
        ``SecureAsk``. The hooks' ``updates_measured`` and ``round_ended`` are called at the end. If
        the round raises an error, the state stays as it was.
        """
        before, method = self.state, self.method
        number = before.round + 1
        if method.capabilities.late_join:
            self._let_latecomers_in(number)
        sites = sorted(method.participants.facts)
        if method.common.sites_per_round:
            sites = draw_sites(method.common, sites, number)
        spill = Spill(self.run_dir)
        kept = dict(before.kept)
        asked = self._open_round(number, sites, kept, spill=spill, proof=before.proof)
        ask: Ask = asked
        if method.common.secure_aggregation != "none":
            ask = SecureAsk(asked)
        try:
            after = method.round(before, ask)
            # A state may store the model under a prefix, but sites reply with its plain names
            asked.measure_updates({**method.model(after), **after.arrays})
        finally:
            spill.close()
        kept = dict(sorted(asked.stateful_sites.items()))
        self.state = replace(after, round=number, kept=kept, proof=asked.proof)
        self.hooks.call("round_ended", self.state)

    def evaluate(self) -> None:
        """Let all sites evaluate the model in ``self.state`` on their data.

        The method's ``evaluate`` asks them. The hooks receive the metrics as those of round
        ``self.state.round``. At trust 'sums' the sites answer through ``SecureAsk``, so the server
        learns only sums over sites. The state does not change.
        """
        state, method = self.state, self.method
        sites = method.participants.sites()
        asked = self._open_round(state.round, sites, dict(state.kept), ends=True)
        if method.common.trust == SUMS:
            method.evaluate(state, SecureAsk(asked))
        else:
            method.evaluate(state, asked)

    def _is_over(self, num_rounds: int) -> bool:
        if self.stopped or self.state.round >= num_rounds or self.method.why_finished(self.state):
            return True
        self.stopped = self.hooks.first("why_finished", self.state) or ""
        return bool(self.stopped)

    def _let_latecomers_in(self, round_: int) -> None:
        """Admit sites that connected since the last call, and update the method's participants.

        ``round_`` is the number of the round that begins next. A node is refused if its description
        of its site is invalid, if it does not meet the run's terms, or if its site is still
        connected on another node. The hooks' ``answer_failed`` and ``site_failed`` are called for
        each refused node. If sites joined or came back on another node, ``participants_changed`` is
        called once. A refusal does not stop the run.
        """
        known = self.method.participants
        away_timeout = self.method.common.away_timeout
        participants, refused = meet_latecomers(self._grid, known, away_timeout)
        joined = []  # new sites, and known ones that came back on another node
        for site, node in sorted(participants.nodes.items()):
            if node != known.nodes.get(site):
                joined.append(site)
        self.method.participants = participants
        for reason in refused:
            self.hooks.call("answer_failed", round_, "hello", "unknown", "not-admitted", reason)
            self.hooks.call("site_failed", round_, "hello", "unknown", reason)
        if joined:
            self.hooks.call("participants_changed", round_, participants, joined)


def draw_sites(common: CommonSettings, sites: Sequence[str], round_: int) -> list[str]:
    """Draw 'server.sites-per-round' of the sites for a round, and return their names, sorted.

    All sites are returned if the setting is 0, or if there are no more sites than that. No site is
    drawn twice. The result depends only on the seed, the round and the set of sites.
    """
    count = common.sites_per_round
    if not count or count >= len(sites):
        return sorted(sites)
    rng = np.random.default_rng(derive_seed(common.seed, "sites-per-round", round_))
    chosen = rng.choice(len(sites), count, replace=False)
    ordered = sorted(sites)
    return sorted(ordered[place] for place in chosen)


def refuse_site_count(common: CommonSettings, sites: int) -> None:
    """Check that enough sites take part for the run's settings.

    Each round asks 'server.sites-per-round' sites. If that is 0, it asks all ``sites``.

    Args:
        common: the run's settings.
        sites: the number of sites that take part.

    Raises:
        SettingError: in one of these cases:

            - 'server.sites-per-round' is above ``sites``.
            - Fewer sites are asked than 'server.aggregation' needs: 3 for "trimmed", 5 for
              "multikrum".
            - Secure aggregation is on, and fewer than 3 sites are asked or 'secure.threshold' does
              not fit their number (``needed_sites``).
    """
    if common.sites_per_round > sites:
        raise SettingError(
            f"setting 'server.sites-per-round' is {common.sites_per_round}, more than there are "
            f"sites ({sites}): lower it, or set it to 0 for all"
        )
    asked = common.sites_per_round or sites
    reason = why_too_few(common, asked)
    if reason:
        raise SettingError(reason)
    if common.secure_aggregation != "none":
        needed_sites(common, asked)
