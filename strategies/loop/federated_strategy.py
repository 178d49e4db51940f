"""The one round loop: phases, checks, failure policy, hooks, and going on from a checkpoint.

Flower's ``Strategy.start`` knows no start round and no checkpoint; it is overridden here once, and
no method copies it. A method says what its state is, which phases a round has, what each site is
sent and how replies are combined.

Messages: ``train`` to each recipient and phase, with ``config``
(models.contract.messages.Instruction) and ``arrays`` (float32, see the method), for tables with
pooled figures also ``figures`` (``mean`` and ``std``, (features,), float64); the reply holds
``metrics`` and the method's ``arrays``. ``evaluate`` closes the run in the same form, its reply
holds metrics only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from models.contract.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    FIGURES,
    NUM_EXAMPLES,
    TRAIN,
    TRAINING,
    Instruction,
)
from models.contract.settings import CommonSettings, NoSettings
from models.contract.settings_schema import Value
from models.networks.kinds import Task
from strategies.loop.hooks import Hook, Stop
from strategies.loop.messaging import exchange
from strategies.loop.reply_checks import needed_metrics, refusal, refuse_too_few
from strategies.loop.reporting import Account
from strategies.loop.roster import Roster, meet_latecomers
from strategies.loop.state import (
    ArraySpec,
    NDArray,
    Packed,
    RoundState,
    SiteReply,
    from_record,
    to_record,
)
from strategies.wire.bundles import record_bytes


class FederatedStrategy(Account, Strategy):
    """A method's server side.

    Class attributes:
        settings_class: the method's own settings.
        title: the method's name for people.
        takes_vit: whether the network can be a ViT, of whose backbone the server knows nothing.
        takes_tables: whether the data can be a table.
        takes_evidence: whether the network can be evidential.
        welcomes: whether a site may join a run that has begun.
        takes_pace, takes_initial_weights: whether an epoch may span rounds, and whether the server
            sends what sites start from.
    """

    settings_class: ClassVar[type] = NoSettings
    title: ClassVar[str] = ""
    takes_vit: ClassVar[bool] = True
    takes_tables: ClassVar[bool] = True
    takes_evidence: ClassVar[bool] = True
    welcomes: ClassVar[bool] = False
    takes_pace: ClassVar[bool] = False
    takes_initial_weights: ClassVar[bool] = False

    def __init__(
        self,
        common: CommonSettings,
        settings: Any,
        roster: Roster,
        hooks: Sequence[Hook] = (),
        run_dir: str = "",
    ) -> None:
        self.common = common
        self.settings = settings
        self.roster = roster
        self.hooks = list(hooks)
        self.stop = Stop(self)
        self.run_dir = run_dir
        self.state: RoundState | None = None
        self._phase = TRAIN
        self._step = 0
        self._asked: dict[str, int] = {}  # bytes sent in the current phase, by site
        self._errors: dict[str, str] = {}  # error replies of the current phase, by site
        self._packed: Packed = {}  # the current round's arrays, serialised once for all sites
        figures = roster.figures()
        self._figures: Mapping[str, NDArray] = vars(figures) if figures else {}
        self._packed_figures: Packed = {}

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: Any) -> None:
        """Refuse settings that contradict each other, by a ``SettingError``."""

    @abstractmethod
    def initial_state(self, task: Task) -> RoundState:
        """Return the state before round 1."""

    def phases(self, state: RoundState) -> Sequence[str]:
        """Return the phases of the round after ``state.round``."""
        return (TRAIN,)

    def recipients(self, phase: str, state: RoundState) -> list[str]:
        """Return the sites that ``phase`` asks; none skips it."""
        return self.roster.sites()

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the arrays that ``site`` is sent; may be empty."""
        return state.arrays

    def notes(self, phase: str, site: str, state: RoundState) -> Mapping[str, Value]:
        """Return what else ``site`` is told (``Instruction.notes``)."""
        return {}

    def model(self, state: RoundState) -> Mapping[str, NDArray]:
        """Return the arrays that are the finished run's model."""
        return state.arrays

    @abstractmethod
    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Return the arrays that ``site`` must answer with."""

    @abstractmethod
    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the state after ``phase``; ``replies`` are checked and sorted by site."""

    def objection(self, phase: str, reply: SiteReply) -> str | None:
        """Return why a reply of the right form cannot be used all the same, None if it can."""
        return None

    def finished(self, state: RoundState) -> bool:
        """Tell whether no further round is wanted."""
        return state.round >= self.common.rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the current phase, in site order."""
        state = self.current()
        return [
            self._message(TRAIN, server_round, site, self.outgoing(self._phase, site, state))
            for site in self.recipients(self._phase, state)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies of the current phase and combine them into the new state."""
        state = self.current()
        good = self._checked(server_round, replies, state)
        keepers = {*state.keepers, *(site for site, reply in good.items() if reply.kept_state())}
        combined = self.combine(self._phase, state, good)
        self.state = replace(combined, keepers=tuple(sorted(keepers)))
        self._tell_phase_ended(server_round, self._phase, good)
        return self._arrays(), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the final evaluation, in site order."""
        state = self.current()
        return [
            self._message(EVALUATE, server_round + 1, site, self.outgoing(EVALUATE, site, state))
            for site in self.roster.sites()
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies of the final evaluation."""
        good = self._checked(server_round, replies, self.current())
        self._tell_phase_ended(server_round, EVALUATE, good)
        return None

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
        train_config = train_config or ConfigRecord()
        if self.state is None:
            self.state = RoundState(0, from_record(initial_arrays))
        for hook in self.hooks:
            hook.run_started(self.state, self.roster, num_rounds)
        result = Result()
        while self.state.round < num_rounds and not (self.finished(self.state) or self.stop.due()):
            with self.stop.rather_than_fail():
                self._run_round(grid, timeout, train_config)
            if evaluate_fn and (measured := evaluate_fn(self.state.round, self._arrays())):
                result.evaluate_metrics_serverapp[self.state.round] = measured
        self._phase, self._step = EVALUATE, 0
        messages = self.configure_evaluate(
            self.state.round, self._arrays(), evaluate_config or ConfigRecord(), grid
        )
        self.aggregate_evaluate(self.state.round, self._exchange(grid, messages, timeout))
        for hook in self.hooks:
            hook.run_ended(self.state)
        result.arrays = self._arrays()
        return result

    def _run_round(self, grid: Grid, timeout: float, config: ConfigRecord) -> None:
        before = self.current()
        round_ = before.round + 1
        self._packed = {}
        if self.welcomes:
            self._welcome(grid, round_)
        for step, phase in enumerate(self.phases(before)):
            self._phase, self._step = phase, step
            messages = list(self.configure_train(round_, self._arrays(), config, grid))
            if messages:
                self.aggregate_train(round_, self._exchange(grid, messages, timeout))
        after = self.current()
        self.state = replace(after, round=round_)
        for hook in self.hooks:
            hook.round_ended(self.state)

    def _welcome(self, grid: Grid, round_: int) -> None:
        """Let sites in that connected since the last round."""
        roster, refused = meet_latecomers(grid, self.roster)
        joined = [
            site for site in roster.sites() if roster.nodes[site] != self.roster.nodes.get(site)
        ]
        self.roster = roster
        for hook in self.hooks:
            for reason in refused:
                hook.site_failed(round_, "hello", "unknown", reason)
            if joined:
                hook.roster_changed(round_, roster, joined)

    def _exchange(self, grid: Grid, messages: Iterable[Message], timeout: float) -> list[Message]:
        """Send, wait, and return what came; a site that stayed silent is told of by its absence."""
        sent = list(messages)
        names = {node: site for site, node in self.roster.nodes.items()}
        round_ = self.current().round + (0 if self._phase == EVALUATE else 1)
        self._asked = {names[m.metadata.dst_node_id]: record_bytes(m.content) for m in sent}
        for hook in self.hooks:
            hook.phase_started(round_, self._phase, sorted(self._asked))

        def arrived(node: int, reply: Message) -> None:
            for hook in self.hooks:
                hook.reply_came(round_, self._phase, names[node])

        real = {self.roster.nodes[s] for s, f in self.roster.facts.items() if not f.homeless}
        replies = exchange(grid, sent, timeout, arrived, real, self.common.away_timeout)
        self._errors = {
            names[node]: reply.error.reason or f"error {reply.error.code}"
            for node, reply in replies.items()
            if reply is not None and reply.has_error()
        }
        return [
            reply
            for _, reply in sorted(replies.items())
            if reply is not None and not reply.has_error()
        ]

    def _checked(
        self, round_: int, replies: Iterable[Message], state: RoundState
    ) -> dict[str, SiteReply]:
        """Return the usable replies by site; apply the failure policy to the others."""
        by_node = {reply.metadata.src_node_id: reply for reply in replies}
        good: dict[str, SiteReply] = {}
        failed: dict[str, str] = {}
        for site in sorted(self._asked):
            reply = by_node.get(self.roster.nodes[site])
            if reply is None or reply.has_error():
                told = reply.error.reason if reply else self._errors.get(site)
                failed[site] = told or "no answer in time"
                continue
            found = SiteReply(site, reply.content, self._asked[site], record_bytes(reply.content))
            reason = self._why_unusable(round_, found, state)
            if reason is None:
                good[site] = found
            else:
                failed[site] = reason
        self._apply_failure_policy(round_, good, failed)
        return good

    def _why_unusable(self, round_: int, reply: SiteReply, state: RoundState) -> str | None:
        phase = self._phase
        expected = {} if phase == EVALUATE else self.expected(phase, reply.site, state)
        sizes = self.roster.facts[reply.site].sizes()
        held = [split for split, size in sizes.items() if size]
        needed = needed_metrics(phase, self._measures_in(round_), held)
        reason = refusal(reply.content, expected, needed)
        if reason:
            return reason
        have = sizes["train"]
        if (told := reply.metric(NUM_EXAMPLES)) != have:
            return f"metric '{NUM_EXAMPLES}' is {told:g}; the site has {have} samples"
        return self.objection(phase, reply)

    def _apply_failure_policy(
        self, round_: int, good: Mapping[str, SiteReply], failed: Mapping[str, str]
    ) -> None:
        refuse_too_few(round_, self._phase, len(good), failed, self.common.min_sites)
        for site, reason in failed.items():
            for hook in self.hooks:
                hook.site_failed(round_, self._phase, site, reason)

    def _tell_phase_ended(self, round_: int, phase: str, good: Mapping[str, SiteReply]) -> None:
        for hook in self.hooks:
            hook.phase_ended(round_, phase, good)

    def _message(self, kind: str, round_: int, site: str, arrays: Mapping[str, NDArray]) -> Message:
        measured = self._phase in TRAINING and self._measures_in(round_)
        instruction = Instruction(
            round=round_,
            phase=self._phase,
            step=self._step,
            run_name=self.common.run_name,
            run_dir=self.run_dir if self.roster.facts[site].homeless else "",
            evaluate=kind == EVALUATE or measured,
            expects_state=site in self.current().keepers,
            returns=kind == TRAIN and bool(self.expected(self._phase, site, self.current())),
            notes=self.notes(self._phase, site, self.current()),
        )
        content = RecordDict({CONFIG: ConfigRecord(dict(instruction.to_config()))})
        if arrays:
            content[ARRAYS] = to_record(arrays, self._packed)
        if self._figures:
            content[FIGURES] = to_record(self._figures, self._packed_figures)
        return Message(content, self.roster.nodes[site], kind, group_id=str(round_))

    def _measures_in(self, round_: int) -> bool:
        every = self.common.evaluate_every
        return every > 0 and (round_ - 1) % every == 0

    def current(self) -> RoundState:
        """Return the current round state; there is one from the start of a run."""
        if self.state is None:
            raise RuntimeError("the strategy has no state yet: call start()")
        return self.state

    def _arrays(self) -> ArrayRecord:
        return to_record(self.current().arrays, self._packed)
