"""One round over a grid: send questions, wait, check the replies, apply the failure policy.

A message holds ``config`` (fedsilo.core.messages.Instruction) and ``arrays`` (float32, named by
the method). For tables with pooled statistics it also holds 'figures': ``mean`` and ``std``,
(features,), float64. A reply holds ``metrics`` and the arrays that were asked for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedsilo.core.errors import ERROR_CODES, EpsilonSpentError, SiteError
from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    INCOMING,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    SECURING,
    STANDARDISED,
    TRAIN,
    TRAINED,
    TRAINING,
    Instruction,
    measurement,
    state_key,
)
from fedsilo.core.one_line import abbreviate, by_reason, one_line
from fedsilo.core.settings.common_settings import SERVER, SUMS
from fedsilo.core.settings_schema import Value
from fedsilo.strategies.loop.ask import Ask, Question, Replies, TooFewSitesError
from fedsilo.strategies.loop.hooks import Hooks
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.plausible import (
    array_fault,
    find_far_updates,
    metric_fault,
    most_counted,
    names_fault,
    update_statistics,
)
from fedsilo.strategies.wire.compressed import Compression
from fedsilo.strategies.wire.messaging import send_and_receive
from fedsilo.strategies.wire.records import Bundles, Packed, bundle, record_bytes, to_record
from fedsilo.strategies.wire.reply import Arrays, Reply, Spill, decode
from fedsilo.strategies.wire.secure_keys import SECURE

_CODES = {number: code for code, number in ERROR_CODES.items()}
# Kinds of failures that no site's own error names; docs/run-directory.md lists them
_NO_ANSWER, _DISCONNECTED, _UNUSABLE = "no-answer", "disconnected", "unusable"


@dataclass(eq=False)
class Round(Ask):
    """Asks the sites of one round over a grid, one question after another.

    It changes nothing outside itself. So a round that fails leaves no trace, and it can be run
    again.
    """

    number: int  # the first round is 1; the final evaluation counts as part of the last round
    sites: Sequence[str]  # the sites that may be asked, sorted
    # The newest state that each site reports to keep (``state_key``), by site
    stateful_sites: dict[str, int]
    method: Method  # its settings and its participants
    hooks: Hooks  # called at the events of the round
    grid: Grid  # Flower's, or the in-process one
    timeout: float = 3600.0  # seconds to wait for the replies of a phase
    run_dir: str = ""  # the folder where simulated sites keep their state
    # A table's pooled statistics, serialised once for all sites and rounds; None without them
    standardisation: ArrayRecord | None = None
    compression: Compression | None = None  # compresses updates; None if sites send whole arrays
    ends: bool = False  # whether this is the final evaluation of the run
    spill: Spill = field(default_factory=Spill)  # keeps the replies' arrays until the round is over
    # The proof of the newest secret sum (``SumProof.to_values``): of the round before or, once
    # there is one, of this round; empty unless the method proves its sums
    proof: Mapping[str, list[str]] = field(default_factory=dict)
    # The phases that have sites measure the weights they receive
    measuring: Collection[str] = field(init=False, default=(EVALUATE,))
    # The sites that gave the current question no usable reply: their reasons, and the codes of the
    # errors that they answered with
    failed: dict[str, str] = field(init=False, default_factory=dict)
    codes: dict[str, str] = field(init=False, default_factory=dict)
    # The kind of failure of each of these sites, for the record of failures
    kinds: dict[str, str] = field(init=False, default_factory=dict)
    # Arrays that several sites receive are serialised once, and so are the bundles of real sites
    _packed: Packed = field(init=False, default_factory=dict)
    _bundles: Bundles = field(init=False, default_factory=dict)
    # The phases of this round in order; the number of the current one, from 0
    _answered: list[tuple[Question, Replies]] = field(init=False, default_factory=list)
    _step: int = field(init=False, default=-1)

    def put(self, question: Question) -> Replies:
        """Ask the sites the question of one phase, and return the usable replies, sorted by site.

        The call waits until each site has replied or failed. For a site without a usable reply,
        ``failed`` of this round has the reason. If a site reports that it stored private state,
        ``stateful_sites`` gets a number for this state (``state_key``).

        The hooks hear of the phase's start and end, and of each reply, disconnection and failure.
        Without sites nothing is sent, and no hook is called.

        Raises:
            SiteError: the method asks a site that does not take part.
            TooFewSitesError: fewer than 'run.min-sites' replies are usable. If the setting is 0 or
                larger than the number of asked sites, all of these are needed.
            RunDirectoryError: the file for the replies' arrays cannot be written.
        """
        self._step += 1
        if self.method.common.measures_in(self.number):
            self.measuring = {EVALUATE, *TRAINING}
        unknown = sorted(set(question.send) - set(self.method.participants.nodes))
        if unknown:
            raise SiteError(
                f"round {self.number}, phase {question.phase}: the method asks {unknown[0]}, "
                f"which does not take part; the sites are {', '.join(self.sites)}"
            )
        if not question.send:
            return Replies({})
        self.failed, self.codes, self.kinds = {}, {}, {}
        replies = Replies(self._check_replies(question, self._exchange(question)))
        for site, reply in replies.items():
            if reply.keeps_state:
                self.stateful_sites[site] = state_key(self.number, self._step)
        self.hooks.call("phase_ended", self.number, question.phase, replies)
        self._answered.append((question, replies))
        return replies

    def measure_updates(self, after: Arrays) -> None:
        """Measure each site's updates of the round, and tell the hooks the norms and cosines.

        A round has one or more phases, each with one question to sites. An update is a site's reply
        minus the arrays from which it started, the question's ``reference``. A phase without
        ``reference`` is skipped. The norm is the length of the update. The cosine compares the
        update with the change of the model in the same phase. The last phase changes the model to
        ``after``. An earlier phase changes it to the arrays that the next phase sent. The hooks'
        ``updates_measured`` is called for one phase at a time, the last phase first.

        Args:
            after: the model's arrays by name after the round.
        """
        # Go back from the last phase, because the arrays of a phase resulted from the phase before
        for question, replies in reversed(self._answered):
            statistics = update_statistics(question.reference, after, replies)
            if statistics:
                self.hooks.call("updates_measured", self.number, question.phase, statistics)
            for sent in question.send.values():
                after = {**after, **sent}

    def message(self, site: str, question: Question) -> Message:
        """Build the message that asks ``site`` a question, without sending it.

        It holds the question's arrays and records, and an instruction with the round, the phase and
        further values. For a table, the pooled mean and standard deviation of each feature are
        added, except in phases of secure aggregation. Weights are sent as bfloat16 if
        'server.wire-down' is "bf16" and sites train. The message's type is "evaluate" in the final
        evaluation, otherwise "train".
        """
        phase, participants = question.phase, self.method.participants
        # Only a simulated site is on this machine, so only it may learn the folder
        run_dir = ""
        if participants.facts[site].simulated:
            run_dir = self.run_dir
        notes: Mapping[str, Value] = {}
        if site in question.notes:
            notes = question.notes[site].to_values()
        instruction = Instruction(
            # Sites count the final evaluation as a round of its own
            round=self.number + (self.ends or phase == EVALUATE),
            phase=phase,
            step=self._step,
            run_name=self.method.common.run_name,
            run_dir=run_dir,
            evaluate=phase in self.measuring,
            expects_state=self.stateful_sites.get(site, 0),
            returns=bool(question.expect.get(site)),
            notes=notes,
        )
        content = RecordDict({CONFIG: ConfigRecord(dict(instruction.to_config()))})
        if site in question.records:
            content[SECURE] = question.records[site]
        arrays = question.send[site]
        if arrays:
            if self.compression and phase in TRAINING:
                self.compression.pack_weights(arrays, self._packed)
            content[ARRAYS] = to_record(arrays, self._packed)
        if self.standardisation is not None and phase not in SECURING:
            content[STANDARDISED] = self.standardisation
        kind = TRAIN  # Flower knows only two kinds; the instruction names the phase
        if phase == EVALUATE:
            kind = EVALUATE
        return Message(content, participants.nodes[site], kind, group_id=str(instruction.round))

    def _exchange(self, question: Question) -> dict[str, Reply]:
        """Send a question to its sites, wait for the replies, and return those that can be decoded.

        The wait ends when each site has replied or is lost, at the latest after ``timeout``
        seconds. A site whose reply is missing or cannot be decoded raises no error. Its reason is
        stored in ``failed``: the error that it sent, the fault in its reply, or "no answer in
        time". ``kinds`` gets the kind of failure, such as "no-answer", if the site sent an error or
        no reply. The hooks ``phase_started``, ``sites_away`` and ``reply_came`` are called.

        Returns:
            The replies by site, in the order in which they arrived. Their content is not checked
            yet.
        """
        phase, participants = question.phase, self.method.participants
        sites = sorted(question.send)
        messages: list[Message] = []
        sizes: dict[str, int] = {}
        site_of: dict[int, str] = {}
        for site in sites:
            message = self.message(site, question)
            # Measured before bundling, so that deployments and simulations report the same bytes
            sizes[site] = record_bytes(message.content)
            # A simulated site's messages pass no SuperLink, so bundling them would only copy them
            if not participants.facts[site].simulated:
                message.content = bundle(message.content, self._bundles)
            messages.append(message)
            site_of[participants.nodes[site]] = site
        self.hooks.call("phase_started", self.number, phase, sites)

        def note_away(nodes: Collection[int]) -> None:
            away = sorted(site_of[node] for node in nodes)
            self.hooks.call("sites_away", self.number, phase, away)

        replies: dict[str, Reply] = {}
        waits = self.timeout, self.method.common.away_timeout
        for node, message in send_and_receive(self.grid, messages, *waits, note_away):
            site = site_of[node]
            try:
                reply = self._decode(site, message, question)
                replies[site] = replace(reply, bytes_down=sizes[site])
            except SiteError as error:
                self.failed[site] = one_line(error)
            self.hooks.call("reply_came", self.number, phase, site)
        for site in sites:
            if site not in replies and site not in self.failed:
                self.failed[site] = "no answer in time"
                self.kinds[site] = _NO_ANSWER
        return replies

    def _decode(self, site: str, message: Message, question: Question) -> Reply:
        """Decode the reply in a message, and store its arrays in ``spill``.

        The reply's ``examples``, its weight in means, is the site's number in the file
        'run.site-weights'. Without that file, it is the number of samples in the reply, or 0 if
        there is none. For an error message, ``codes`` gets the site's error code, and ``kinds`` the
        kind of failure.

        Raises:
            SiteError: the message is an error, the reply is malformed, or an array has impossible
                values. The text is one line.
            RunDirectoryError: ``spill`` cannot write the arrays to its file.
        """
        if message.has_error():
            self.codes[site] = _CODES.get(message.error.code, "")
            self.kinds[site] = self.codes[site] or SiteError.code
            if message.error.code == ErrorCode.NODE_UNAVAILABLE:
                self.kinds[site] = _DISCONNECTED
            reason = message.error.reason or f"error {message.error.code}"
            raise SiteError(abbreviate(reason.removeprefix(f"site {site}: ")))
        expected = question.expect.get(site, {})
        if self.compression:
            sent = question.send[site]
            reply = self.compression.decode_reply(site, message.content, expected, sent)
        else:
            reply = decode(site, message.content, expected)
        for name, array in reply.arrays.items():
            if array.dtype.kind == "f":
                fault = array_fault(name, array)
                if fault:
                    raise SiteError(fault)
        examples = int(reply.metrics.get(NUM_EXAMPLES, 0))
        # A site's own count does not matter if 'run.site-weights' has an agreed one
        agreed = self.method.participants.terms.weights
        if agreed:
            examples = agreed.samples[site]
        return replace(reply, arrays=self.spill.keep(reply.arrays), examples=examples)

    def _check_replies(self, question: Question, replies: Mapping[str, Reply]) -> dict[str, Reply]:
        """Select the usable replies to a question, and check that the run can continue with them.

        A reply is unusable if ``_find_fault`` finds a fault, or if the norm of its update is above
        the limit of 'server.max-update-norm'. ``failed`` gets the reason. It already has the sites
        without a decoded reply. The hooks' ``answer_failed`` is called for each failed site. If the
        run continues, ``site_failed`` is called for each of them too.

        Args:
            question: the question that was asked.
            replies: the decoded replies by site.

        Returns:
            The usable replies by site, sorted.

        Raises:
            TooFewSitesError: too few usable replies are left (``_refuse_too_few``).
        """
        usable: dict[str, Reply] = {}
        for site in sorted(replies):
            fault = self._find_fault(question, replies[site])
            if fault:
                self.failed[site] = fault
            else:
                usable[site] = replies[site]
        limit = self.method.common.max_update_norm
        if limit:
            # After the single checks, because an unusable reply must not move the median
            for site, reason in find_far_updates(limit, question.reference, usable).items():
                self.failed[site] = reason
                del usable[site]
        # Before the run may end here, because the record of failures must say why it did
        for site in sorted(self.failed):
            kind = self.kinds.get(site, _UNUSABLE)
            self.hooks.call(
                "answer_failed", self.number, question.phase, site, kind, self.failed[site]
            )
        if len(usable) < len(question.send):
            self._refuse_too_few(question, len(usable))
        for site in sorted(self.failed):
            self.hooks.call("site_failed", self.number, question.phase, site, self.failed[site])
        return usable

    def _find_fault(self, question: Question, reply: Reply) -> str | None:
        """Explain in one line why a decoded reply is unusable, or return None if it is usable.

        The setting 'trust' says whom a site trusts: the server with its own numbers ("server"), the
        server with sums over sites ("sums"), or "nobody". The checks run in this order, and the
        first fault is returned:

        - All required metrics are present. These are the metrics in ``question.metrics``. Unless
          'trust' is "sums", they are also the number of samples and the losses and other
          measurements of the phase (``_needed_metrics``). At trust "server", they are also time
          and memory.
        - Each metric has a possible value (``metric_fault``).
        - Each metric has a valid name (``names_fault``).
        - Unless 'trust' is "sums", the number of training samples is above 0, and the same as in
          the site's description of itself.
        - The method's check ``question.fault`` and the hooks' ``objection`` return None.
        """
        facts, metrics = self.method.participants.facts, reply.metrics
        common, own = self.method.common, facts[reply.site]
        # A server that learns only sums gets neither times nor memory of a single site
        needed: list[str] = []
        if common.trust != SUMS:
            needed += [NUM_EXAMPLES, *self._needed_metrics(question.phase, own.measured_splits)]
        if common.trust == SERVER:
            needed += [SECONDS, PEAK_MEMORY]
        for key in (*needed, *question.metrics):
            if key not in metrics:
                return f"metric '{key}' is missing"
        most = most_counted(own, common)
        for key, value in metrics.items():
            fault = metric_fault(key, value, own.classes, most)
            if fault:
                return one_line(fault)
        # Sites may have joined since the run began, so the names are read again
        fault = names_fault(metrics, own.classes, facts.keys())
        if fault:
            return one_line(fault)
        samples = own.sizes.get("train")
        if common.trust != SUMS and not 0 < metrics[NUM_EXAMPLES] == samples:
            said = metrics[NUM_EXAMPLES]
            return f"metric '{NUM_EXAMPLES}' is {said:g}; the site has {samples} samples"
        if question.fault and (fault := question.fault(reply)):
            return abbreviate(fault)  # shortened, because the text may quote the arrays
        return self.hooks.first("objection", self.number, question.phase, reply)

    def _needed_metrics(self, phase: str, splits: Collection[str]) -> Iterable[str]:
        """Yield the keys of the metrics that a reply to ``phase`` must have.

        A training phase needs ``trained.train.loss``. A phase in ``measuring``, in which sites
        measure the received model, needs ``incoming.<split>.<metric>``. These keys are for the
        splits val and test, and for each metric in the task's ``always``. A phase can be of both
        kinds or of neither.

        Args:
            phase: the phase of the question.
            splits: the splits that the site measures. Metrics on other splits are not needed.
        """
        if phase in TRAINING and "train" in splits:
            yield measurement(TRAINED, "train", "loss")
        if phase in self.measuring:
            for split in ("val", "test"):
                if split in splits:
                    for metric in self.method.task.always:
                        yield measurement(INCOMING, split, metric)

    def _refuse_too_few(self, question: Question, answered: int) -> None:
        """Check that at least 'run.min-sites' replies are usable.

        If the setting is 0, or larger than the number of asked sites, each asked site must reply.
        In the final evaluation, a site whose differential privacy budget (epsilon) is spent does
        not count as asked. A setting that is small enough for the remaining sites is not lowered.

        Args:
            question: the question that was asked.
            answered: the number of usable replies.

        Raises:
            TooFewSitesError: too few replies are usable. The text has each failed site's reason,
                and the numbers of usable and needed replies. The attribute ``codes`` has the sites'
                error codes.
        """
        asked, phase = len(question.send), question.phase
        spent = list(self.codes.values()).count(EpsilonSpentError.code)
        # A site whose epsilon is spent has trained as agreed, so the final evaluation goes on
        # without it
        owed = asked - spent * (phase == EVALUATE)
        needed = min(self.method.common.min_sites or owed, owed)
        if answered >= needed:
            return
        failed = by_reason((f"site {site}", self.failed[site]) for site in sorted(self.failed))
        parts = []
        for reason, sites in failed.items():
            parts.append(f"{sites}, round {self.number}, phase {phase}: {reason}")
        reasons = "; ".join(parts)
        raise TooFewSitesError(
            f"{reasons} -- {answered} of {asked} sites answered and {needed} are needed "
            "('run.min-sites'): repair the site and resume or start again, or set 'run.min-sites' "
            "to fewer",
            reasons,
            self.codes.values(),
        )
