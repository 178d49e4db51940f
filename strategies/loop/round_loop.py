"""The one round loop: phases, checks, failure policy, hooks, and going on from a checkpoint.

Flower's ``Strategy.start`` knows no start round and no checkpoint; it is overridden here once. What
a method adds is in ``fedsilo.strategies.loop.method``.

Messages: ``train`` to each recipient and phase, with ``config``
(models.contract.messages.Instruction) and ``arrays`` (float32, see the method), for tables with
pooled figures also ``figures`` (``mean`` and ``std``, (features,), float64); the reply holds
``metrics`` and the method's ``arrays``. ``evaluate`` closes the run in the same form, its reply
holds metrics only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    FIGURES,
    SECURE_UNMASK,
    SECURING,
    TRAIN,
    Instruction,
)
from fedsilo.models.contract.one_line import shortened
from fedsilo.strategies.loop.contributions import contributions, far_out
from fedsilo.strategies.loop.drawing import drawn_sites
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.messaging import exchange
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.participants import meet_latecomers
from fedsilo.strategies.loop.phase import Phase
from fedsilo.strategies.loop.reply_checks import (
    code_of,
    expected_of,
    most_bytes,
    refuse_too_few,
    why_unusable,
)
from fedsilo.strategies.loop.secure_round import SecureRound, secured_phases
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.loop.stopping import Stop
from fedsilo.strategies.wire.bundles import record_bytes
from fedsilo.strategies.wire.records import NDArray, Packed, from_record, to_record
from fedsilo.strategies.wire.secure_keys import SECURE
from fedsilo.strategies.wire.shelf import Shelf


@final
class RoundLoop(Strategy):
    """Runs a method's rounds over the sites of a grid.

    Attributes:
        method: what is sent and how replies are combined.
        hooks: what happens beside.
        state: the newest round's; None before the start of a run that has no state yet.
        stop: why the run ends early, if a hook says so.
    """

    def __init__(self, method: Method, hooks: Sequence[Hook] = (), run_dir: str = "") -> None:
        self.method = method
        self.hooks = list(hooks)
        self.run_dir = run_dir
        self.state: RoundState | None = None
        self.stop = Stop(self.hooks, self._releases_ahead)
        self._phase = Phase(EVALUATE, 0)
        self._secure: SecureRound | None = None  # where weights are summed in secret
        self._packed: Packed = {}  # the current round's arrays, serialised once for all sites
        figures = method.participants.figures()
        self._figures: Mapping[str, NDArray] = vars(figures) if figures else {}
        self._packed_figures: Packed = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds after ``self.state`` (else from ``initial_arrays``), then evaluate.

        Raises:
            SiteError: too few sites answered a phase with something usable.
        """
        state = self.state = self.state or RoundState(0, from_record(initial_arrays))
        for hook in self.hooks:
            hook.run_started(state, self.method.participants, num_rounds)
        result = Result()
        while self._goes_on(state, num_rounds):
            try:
                state = self.run_round(grid, timeout)
            except SiteError as error:
                if not self.stop.ends_well(state, error):
                    raise
                self.state = state
            if evaluate_fn and (measured := evaluate_fn(state.round, to_record(state.arrays))):
                result.evaluate_metrics_serverapp[state.round] = measured
        self._run_phase(grid, timeout, Phase(EVALUATE, state.round))
        for hook in self.hooks:
            hook.run_ended(state)
        result.arrays = to_record(state.arrays)
        return result

    def run_round(self, grid: Grid, timeout: float) -> RoundState:
        """Run the round after the current state, phase by phase, and return its state."""
        before = self.current()
        round_ = before.round + 1
        self._packed = {}
        names = self.method.phases(before)
        if self.method.common.secure_aggregation != "none":
            self._secure, names = self._new_secure_round(before), secured_phases(names)
        if self.method.capabilities.late_join:
            self._let_latecomers_in(grid, round_)
        try:
            for step, name in enumerate(names):
                measures = self.method.common.measures_in(round_)
                self._run_phase(grid, timeout, Phase(name, round_, step, measures))
        finally:
            self._secure = None
        state = self.state = replace(self.current(), round=round_)
        for hook in self.hooks:
            hook.round_ended(state)
        return state

    def _new_secure_round(self, before: RoundState) -> SecureRound:
        drawn = self._drawn(before.round + 1)
        specs = self.method.expected(TRAIN, drawn[0], before).values()
        numbers = sum(math.prod(length or 1 for length in spec.shape) for spec in specs)
        return SecureRound(before.round + 1, self.method.common, numbers, len(drawn))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the current phase, in site order."""
        phase, secure = self._phase.name, self._secure
        named = TRAIN if phase in SECURING else phase
        drawn = set(self._drawn(self._phase.round))
        return [
            self._message(site)
            for site in self.method.recipients(named, self.current())
            if site in drawn and (secure is None or secure.asks(phase, site))
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies of the current phase and combine them into the new state."""
        state, usable = self.current(), self._checked(replies)
        stateful_sites = {
            *state.stateful_sites,
            *(site for site, reply in usable.items() if reply.kept_state()),
        }
        phase = self._phase.name
        combined = self._combined(phase, state, usable)
        self.state = replace(combined, stateful_sites=tuple(sorted(stateful_sites)))
        for hook in self.hooks:
            hook.phase_ended(server_round, phase, usable)
        if self._secure:  # of no site's update is anything known
            return None, None
        if parts := contributions(self.method, phase, (state, combined), usable):
            for hook in self.hooks:
                hook.updates_measured(server_round, phase, parts)
        return None, None

    def _combined(
        self, phase: str, state: RoundState, usable: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the state after a phase; of a secured one after the last that secures it."""
        secure = self._secure
        if secure is None or phase not in (TRAIN, *SECURING):
            return self.method.combine(phase, state, usable)
        if phase != SECURE_UNMASK:
            secure.take(phase, usable)
            return state
        before = self.method.reference(TRAIN, next(iter(secure.replies)), state)
        return self.method.combine(TRAIN, state, secure.summed(usable, before))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the final evaluation, in site order."""
        return [self._message(site) for site in self.method.participants.sites()]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies of the final evaluation."""
        usable = self._checked(replies)
        for hook in self.hooks:
            hook.phase_ended(server_round, EVALUATE, usable)
        return None

    def summary(self) -> None:
        """Say nothing: the progress hook tells what runs."""

    def current(self) -> RoundState:
        """Return the current round state; there is one from the start of a run."""
        if self.state is None:
            raise RuntimeError("the loop has no state yet: call start()")
        return self.state

    def _goes_on(self, state: RoundState, num_rounds: int) -> bool:
        over = state.round >= num_rounds or self.method.why_finished(state) or self.stop.reason
        return not (over or self.stop.due(state))

    def _releases_ahead(self, state: RoundState) -> dict[str, int]:
        """Count the replies with arrays that each site would give in the next round, at most."""
        phases = self.method.phases(state)
        return {
            site: sum(1 for phase in phases if self.method.expected(phase, site, state))
            for site in self._drawn(state.round + 1)
        }

    def _drawn(self, round_: int) -> list[str]:
        return drawn_sites(self.method.common, self.method.participants.sites(), round_)

    def _run_phase(self, grid: Grid, timeout: float, phase: Phase) -> None:
        """Ask, wait, check and combine."""
        self._phase = phase
        none, config = ArrayRecord(), ConfigRecord()
        with Shelf(self.run_dir) as shelf:
            if phase.name == EVALUATE:
                asked = self.configure_evaluate(phase.round, none, config, grid)
                self.aggregate_evaluate(phase.round, self._exchange(grid, asked, timeout, shelf))
            elif messages := list(self.configure_train(phase.round, none, config, grid)):
                replies = self._exchange(grid, messages, timeout, shelf)
                self.aggregate_train(phase.round, replies)

    def _let_latecomers_in(self, grid: Grid, round_: int) -> None:
        """Let sites in that connected since the last round."""
        known = self.method.participants
        participants, refused = meet_latecomers(grid, known)
        joined = [
            site
            for site in participants.sites()
            if participants.nodes[site] != known.nodes.get(site)
        ]
        self.method.participants = participants
        for hook in self.hooks:
            for reason in refused:
                hook.site_failed(round_, "hello", "unknown", reason)
            if joined:
                hook.participants_changed(round_, participants, joined)

    def _exchange(
        self, grid: Grid, messages: Iterable[Message], timeout: float, shelf: Shelf
    ) -> list[Message]:
        """Send, wait, and return what came; a site that stayed silent is told of by its absence."""
        phase, participants, sent = self._phase, self.method.participants, list(messages)
        site_of = {node: site for site, node in participants.nodes.items()}
        phase.sent = {site_of[m.metadata.dst_node_id]: record_bytes(m.content) for m in sent}
        returning = [m for m in sent if m.content.config_records[CONFIG]["returns"]]
        for hook in self.hooks:
            hook.phase_started(phase.round, phase.name, sorted(phase.sent))
            hook.arrays_asked(
                phase.round, phase.name, sorted(site_of[m.metadata.dst_node_id] for m in returning)
            )

        def arrived(node: int, reply: Message) -> None:
            for hook in self.hooks:
                hook.reply_came(phase.round, phase.name, site_of[node])

        def away(nodes: Collection[int]) -> None:
            for hook in self.hooks:
                hook.sites_away(phase.round, phase.name, sorted(site_of[node] for node in nodes))

        # No SuperLink stores what a simulated site gets, so that bundles would only cost copies
        real = {
            participants.nodes[s] for s, facts in participants.facts.items() if not facts.simulated
        }
        most = {participants.nodes[s]: most_bytes(self._expected(s)) for s in phase.sent}
        replies = exchange(
            grid,
            sent,
            timeout,
            arrived,
            real,
            self.method.common.away_timeout,
            away,
            shelf.keep,
            most,
        )
        came = [(node, reply) for node, reply in sorted(replies.items()) if reply is not None]
        for node, reply in came:
            if reply.has_error():
                reason = reply.error.reason or f"error {reply.error.code}"
                phase.errors[site_of[node]] = shortened(reason)
                phase.codes[site_of[node]] = code_of(reply.error.code)
        return [reply for _, reply in came if not reply.has_error()]

    def _checked(self, replies: Iterable[Message]) -> dict[str, SiteReply]:
        """Return the usable replies by site; apply the failure policy to the others."""
        phase, nodes = self._phase, self.method.participants.nodes
        agreed = self.method.participants.agreed()
        by_node = {reply.metadata.src_node_id: reply.content for reply in replies}
        usable: dict[str, SiteReply] = {}
        failed: dict[str, str] = {}
        for site in sorted(phase.sent):
            content = by_node.get(nodes[site])
            if content is None:
                failed[site] = phase.errors.get(site, "no answer in time")
                continue
            came = record_bytes(content)
            reply = SiteReply(site, content, phase.sent[site], came, agreed.get(site))
            if reason := self._why_unusable(reply):
                failed[site] = reason
            else:
                usable[site] = reply
        if not self._secure:
            failed |= far_out(self.method, phase.name, self.current(), usable)
        usable = {site: reply for site, reply in usable.items() if site not in failed}
        refuse_too_few(phase, len(usable), failed, self.method.common.min_sites)
        for site, reason in failed.items():
            for hook in self.hooks:
                hook.site_failed(phase.round, phase.name, site, reason)
        return usable

    def _why_unusable(self, reply: SiteReply) -> str:
        """Say why a reply cannot be used, by the method or by a hook; empty: it can."""
        phase = self._phase
        expected = self._expected(reply.site)
        if reason := why_unusable(reply, phase, self.method, self.current(), expected):
            return reason
        if self._secure and (reason := self._secure.fault(phase.name, reply)):
            return reason
        objections = (hook.objection(phase.round, phase.name, reply) for hook in self.hooks)
        return next((objection for objection in objections if objection), None) or ""

    def _expected(self, site: str) -> Mapping[str, ArraySpec]:
        """Return the arrays that a site must answer the current phase with."""
        if self._secure is None or self._phase.name not in (TRAIN, *SECURING):
            return expected_of(site, self._phase, self.method, self.current())
        return self._secure.expected(
            self._phase.name, self.method.expected(TRAIN, site, self.current())
        )

    def _message(self, site: str) -> Message:
        phase, method, state = self._phase, self.method, self.current()
        asked_for, keys = self._expected(site), phase.name in SECURING
        instruction = Instruction(
            round=phase.message_round,
            phase=phase.name,
            step=phase.step,
            run_name=method.common.run_name,
            run_dir=self.run_dir if method.participants.facts[site].simulated else "",
            evaluate=phase.evaluates,
            expects_state=site in state.stateful_sites,
            returns=bool(asked_for),
            notes={} if keys else method.notes(phase.name, site, state).to_values(),
        )
        content = RecordDict({CONFIG: ConfigRecord(dict(instruction.to_config()))})
        if self._secure and phase.name in (TRAIN, *SECURING):
            content[SECURE] = self._secure.record(phase.name, site)
        if not keys and (arrays := method.outgoing(phase.name, site, state)):
            content[ARRAYS] = to_record(arrays, self._packed)
        if self._figures and not keys:
            content[FIGURES] = to_record(self._figures, self._packed_figures)
        group = str(phase.message_round)
        return Message(content, method.participants.nodes[site], phase.kind, group_id=group)
