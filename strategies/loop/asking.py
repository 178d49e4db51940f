"""Ask the sites of a round: send, wait, check, apply the failure policy, return the replies.

A message holds ``config`` (models.contract.messages.Instruction) and ``arrays`` (float32, named by
the method). For tables with pooled statistics it also holds ``figures``: ``mean`` and ``std``,
(features,), float64. A reply holds ``metrics`` and the arrays that were asked for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsilo.models.contract.errors import ERROR_CODES, EpsilonSpentError, SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    FIGURES,
    INCOMING,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    SECURING,
    TRAIN,
    TRAINED,
    TRAINING,
    Instruction,
    measurement,
    state_key,
)
from fedsilo.models.contract.one_line import by_reason, one_line, shortened
from fedsilo.models.contract.settings import SERVER, SUMS, CommonSettings
from fedsilo.strategies.loop.ask import Ask, Question, Replies, TooFewSitesError
from fedsilo.strategies.loop.hooks import Hooks
from fedsilo.strategies.loop.plausible import (
    array_fault,
    far_out,
    metric_fault,
    most_counted,
    names_fault,
    update_statistics,
)
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.compressed import Compression
from fedsilo.strategies.wire.messaging import arriving
from fedsilo.strategies.wire.records import Bundles, Packed, bundle, record_bytes, to_record
from fedsilo.strategies.wire.reply import Arrays, Reply, Spill, decode
from fedsilo.strategies.wire.secure_keys import SECURE

_CODES = {number: code for code, number in ERROR_CODES.items()}


@dataclass
class Session:
    """The parts that all questions of a run share."""

    grid: Grid  # Flower's, or the in-process one
    common: CommonSettings  # the run's settings
    participants: Participants  # the sites; replaced when a site joins late
    hooks: Hooks  # called at the events of a round
    run_dir: str = ""  # the folder in which simulated sites keep their state
    timeout: float = 3600.0  # seconds to wait for the replies of a phase
    # The newest state that each site reports to keep (``state_key``), by site
    kept: dict[str, int] = field(default_factory=dict)
    # A table's pooled statistics, serialised once for all sites and rounds; None without them
    figures: ArrayRecord | None = None
    # Compresses updates; None if sites send whole arrays
    compression: Compression | None = None


class GridAsk(Ask):
    """Asks the sites of one round over a grid.

    Args:
        session: the parts that all questions of the run share.
        round_: the round, from 1. The final evaluation counts as part of the last round.
        sites: the sites that may be asked.
        spill: keeps the arrays of replies until the round is over.
        ends: whether this is the final evaluation of the run.
    """

    def __init__(
        self, session: Session, round_: int, sites: Sequence[str], spill: Spill, ends: bool = False
    ) -> None:
        self.session = session
        self.round = round_
        self.ends = ends
        self.sites = list(sites)
        # The same object, so that sites that keep state in this round are added to it
        self.stateful_sites = session.kept
        self.spill = spill
        self._step = -1
        self._packed: Packed = {}  # arrays that several sites receive are serialised once
        self.bundles: Bundles = {}  # the same for the bundles that real sites receive
        self._answered: list[tuple[Question, Replies]] = []  # the phases of this round, in order

    def put(self, question: Question) -> Replies:
        """Send a question to its sites and return the usable replies; see ``Ask``."""
        self._step += 1
        if unknown := sorted(set(question.send) - set(self.session.participants.nodes)):
            raise SiteError(
                f"round {self.round}, phase {question.phase}: the method asks {unknown[0]}, which "
                f"takes no part; the sites are {', '.join(self.sites)}"
            )
        if not question.send:
            return Replies({})
        exchange = _Exchange(self, question)
        usable = exchange.check_replies(exchange.answers())
        key = state_key(self.round, self._step)
        self.session.kept.update({s: key for s, r in usable.items() if r.keeps_state()})
        replies = Replies(usable)
        self.session.hooks.call("phase_ended", self.round, question.phase, replies)
        self._answered.append((question, replies))
        return replies

    def measure_updates(self, after: Arrays) -> None:
        """Compare each site's update with the change of the model, for each phase of the round.

        Args:
            after: the model's arrays by name after the round.
        """
        if not self.session.hooks.has("updates_measured"):
            return
        # Go back from the last phase, because the arrays of a phase resulted from the phase before
        for question, replies in reversed(self._answered):
            statistics = update_statistics(question.reference, after, replies)
            if statistics:
                self.session.hooks.call("updates_measured", self.round, question.phase, statistics)
            for sent in question.send.values():
                after = {**after, **sent}

    def message(self, site: str, question: Question) -> Message:
        """Build the message that asks ``site`` a question."""
        session, phase = self.session, question.phase
        facts = session.participants.facts[site]
        instruction = Instruction(
            round=self.asked_round(phase),
            phase=phase,
            step=self._step,
            run_name=session.common.run_name,
            run_dir=session.run_dir if facts.simulated else "",
            evaluate=self.evaluates(phase),
            expects_state=session.kept.get(site, 0),
            returns=bool(question.expect.get(site)),
            notes=question.notes[site].to_values() if site in question.notes else {},
        )
        content = RecordDict({CONFIG: ConfigRecord(dict(instruction.to_config()))})
        if site in question.records:
            content[SECURE] = question.records[site]
        if arrays := question.send[site]:
            if session.compression and phase in TRAINING:
                session.compression.pack(arrays, self._packed)
            content[ARRAYS] = to_record(arrays, self._packed)
        if session.figures is not None and phase not in SECURING:
            content[FIGURES] = session.figures
        nodes, kind = session.participants.nodes, EVALUATE if phase == EVALUATE else TRAIN
        return Message(content, nodes[site], kind, group_id=str(instruction.round))

    def asked_round(self, phase: str = "") -> int:
        """Return the round number for a message; the final evaluation is one round later."""
        return self.round + (self.ends or phase == EVALUATE)

    def evaluates(self, phase: str) -> bool:
        """Tell whether sites measure the weights that they receive in this phase."""
        measured = phase in TRAINING and self.session.common.measures_in(self.round)
        return phase == EVALUATE or measured


class _Exchange:
    """One question while its replies arrive."""

    def __init__(self, ask: GridAsk, question: Question) -> None:
        self.ask = ask
        self.question = question
        self.sites = sorted(question.send)
        self.sent: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.codes: dict[str, str] = {}
        self.agreed = ask.session.participants.agreed_samples()

    def answers(self) -> dict[str, Reply]:
        """Send the messages, wait, and return the replies that could be decoded, by site.

        ``failed`` holds the reason for each site without a decoded reply.
        """
        ask, question, session = self.ask, self.question, self.ask.session
        messages = {site: ask.message(site, question) for site in self.sites}
        self.sent = {site: record_bytes(message.content) for site, message in messages.items()}
        self._call("phase_started", self.sites)
        for site, message in messages.items():
            # A simulated site's messages pass no SuperLink, so bundling them would only copy them
            if not session.participants.facts[site].simulated:
                message.content = bundle(message.content, ask.bundles)
        site_of = {session.participants.nodes[site]: site for site in self.sites}

        def away(nodes: Collection[int]) -> None:
            self._call("sites_away", sorted(site_of[node] for node in nodes))

        answers: dict[str, Reply] = {}
        waits, asked = (session.timeout, session.common.away_timeout), list(messages.values())
        for node, message in arriving(session.grid, asked, *waits, away):
            if reply := self._decode(site_of[node], message):
                answers[reply.site] = reply
            self._call("reply_came", site_of[node])
        for site in self.sites:
            if site not in answers and site not in self.failed:
                self.failed[site] = "no answer in time"
        return answers

    def _call(self, event: str, *args: Any) -> None:
        self.ask.session.hooks.call(event, self.ask.round, self.question.phase, *args)

    def _decode(self, site: str, message: Message) -> Reply | None:
        """Return a reply of the right form; else note the reason in ``failed`` and return None."""
        if message.has_error():
            reason = message.error.reason or f"error {message.error.code}"
            self.failed[site] = shortened(reason.removeprefix(f"site {site}: "))
            self.codes[site] = _CODES.get(message.error.code, "")
            return None
        expected = self.question.expect.get(site, {})
        try:
            if wire := self.ask.session.compression:
                reply = wire.reply(site, message.content, expected, self.question.send[site])
            else:
                reply = decode(site, message.content, expected)
        except SiteError as error:
            self.failed[site] = one_line(error)
            return None
        faults = (array_fault(n, a) for n, a in reply.arrays.items() if a.dtype.kind == "f")
        if fault := next(filter(None, faults), None):
            self.failed[site] = one_line(fault)
            return None
        # A site's own count does not matter if 'run.site-weights' has an agreed one
        examples = self.agreed.get(site, int(reply.metrics.get(NUM_EXAMPLES, 0)))
        return replace(
            reply,
            arrays=self.ask.spill.keep(reply.arrays),
            examples=examples,
            bytes_down=self.sent[site],
        )

    def check_replies(self, answers: Mapping[str, Reply]) -> dict[str, Reply]:
        """Return the usable replies by site, and apply the failure policy to the others.

        Raises:
            TooFewSitesError: fewer usable replies than 'run.min-sites' are left.
        """
        usable: dict[str, Reply] = {}
        for site in sorted(answers):
            if reason := self._fault(answers[site]):
                self.failed[site] = reason
            else:
                usable[site] = answers[site]
        session = self.ask.session
        if limit := session.common.max_update_norm:
            self.failed |= far_out(limit, self.question.reference, usable)
        usable = {site: reply for site, reply in usable.items() if site not in self.failed}
        self._refuse_too_few(len(usable), session.common.min_sites)
        for site in sorted(self.failed):
            self._call("site_failed", site, self.failed[site])
        return usable

    def _fault(self, reply: Reply) -> str | None:
        """Explain why a reply is unusable, or return None.

        Metrics are check_replies first, then the method's own rule, then the objections of hooks.
        """
        question, session = self.question, self.ask.session
        facts, metrics = session.participants.facts[reply.site], reply.metrics
        trust = session.common.trust
        # A server that learns only sums gets neither times nor memory of a single site
        needed = [] if trust == SUMS else [NUM_EXAMPLES, *self._needed_metrics(facts.held())]
        if trust == SERVER:
            needed += [SECONDS, PEAK_MEMORY]
        for key in (*needed, *question.metrics):
            if key not in metrics:
                return f"metric '{key}' is missing"
        most = most_counted(facts, session.common)
        for key, value in metrics.items():
            if fault := metric_fault(key, value, facts.classes, most):
                return one_line(fault)
        # Sites may have joined since the run began, so the names are read again
        unknown = names_fault(metrics, facts.classes, session.participants.facts.keys())
        if unknown:
            return one_line(unknown)
        samples = facts.sizes().get("train")
        if trust != SUMS and not 0 < metrics[NUM_EXAMPLES] == samples:
            said = metrics[NUM_EXAMPLES]
            return f"metric '{NUM_EXAMPLES}' is {said:g}; the site has {samples} samples"
        if question.fault and (fault := question.fault(reply)):
            return shortened(fault)  # shortened, because the text may quote the arrays
        return session.hooks.first("objection", self.ask.round, question.phase, reply)

    def _needed_metrics(self, held: Collection[str]) -> Iterable[str]:
        """Yield the names of the metrics that a reply must have.

        Args:
            held: the splits of which the site has samples.
        """
        phase = self.question.phase
        if phase in TRAINING and "train" in held:
            yield measurement(TRAINED, "train", "loss")
        if self.ask.evaluates(phase):
            for split in ("val", "test"):
                for metric in ("accuracy", "entropy", "loss") if split in held else ():
                    yield measurement(INCOMING, split, metric)

    def _refuse_too_few(self, answered: int, min_sites: int) -> None:
        """Refuse to continue with fewer than ``min_sites`` usable replies; 0 means all sites asked.

        A phase cannot need more replies than it asked for. The final evaluation does not need the
        reply of a hospital whose epsilon is spent.
        """
        asked = len(self.sites)
        spent = list(self.codes.values()).count(EpsilonSpentError.code)
        owed = asked - spent * (self.question.phase == EVALUATE)
        needed = min(min_sites or owed, owed)
        if answered >= needed:
            return
        failed = by_reason((f"site {site}", self.failed[site]) for site in sorted(self.failed))
        reasons = "; ".join(
            f"{sites}, round {self.ask.round}, phase {self.question.phase}: {reason}"
            for reason, sites in failed.items()
        )
        raise TooFewSitesError(
            f"{reasons} -- {answered} of {asked} sites answered and {needed} are needed "
            "('run.min-sites'): repair the site and resume or start again, or set 'run.min-sites' "
            "to fewer",
            reasons,
            self.codes.values(),
        )
