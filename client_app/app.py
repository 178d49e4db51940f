"""The Flower ClientApp: it answers messages from the site's session and turns errors into replies.

An error reply names the site, the round and the reason, so that the server's failure policy can
decide what to do. The traceback stays in the site's own log. A hospital with a site file obeys that
file, and each message gets a line in its audit log before the reply leaves.

This module also decides which errors the server may see. Once patients' data have been opened, a
hospital that does not show the server its single answers sends a constant error text. In a secure
sum it sends no error at all: a site that could not answer adds 0, so the server learns only how
many sites could not answer.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.client_app.site.node import (
    Answering,
    Opened,
    context_of_simulated_site,
    is_simulated,
    owner_only,
    track_opening,
)
from fedsilo.client_app.site.trust import constant_error, tells_single_answers
from fedsilo.core.errors import (
    ERROR_CODES,
    CheckpointError,
    FedsiloError,
    FileNamesError,
    RefusedError,
    SettingError,
    WithheldError,
)
from fedsilo.core.messages import (
    CONFIG,
    EVALUATE,
    HELLO,
    SECURING,
    SIMULATED_SITE,
    SURVEY,
    TRAIN,
    Instruction,
)
from fedsilo.core.one_line import quote_value
from fedsilo.core.settings.common_settings import SUMS
from fedsilo.core.settings.removed import RENAMED, with_current_keys
from fedsilo.core.versions import refuse_other_versions
from fedsilo.strategies.wire.records import bundle, unbundle


class HospitalApp(ClientApp):
    """A ClientApp that answers only known kinds of message, and logs and refuses all others.

    Flower would also accept ``evaluate.default`` for ``evaluate``, but quotas and the audit log
    know only one name for each kind.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message of a known kind, and refuse any other kind with an error reply.

        The known kinds are hello, survey, train and evaluate. Settings under the names of an older
        version are renamed first. If a setting has both names, the message is refused too.
        """
        if RENAMED.keys() & context.run_config.keys():  # a server with another app may send them
            try:
                current = with_current_keys(context.run_config, quietly=True)
            except SettingError as fault:  # a setting is given under both names
                return refuse(message, context, RefusedError(str(fault)))
            context = replace(context, run_config=current)
        kind = message.metadata.message_type
        if kind in _KINDS:
            return super().__call__(message, context)
        error = RefusedError(f"a hospital does not answer messages of kind {quote_value(kind)}")
        return refuse(message, context, error)


_KINDS = (HELLO, SURVEY, TRAIN, EVALUATE)
app = HospitalApp()

if TYPE_CHECKING:
    from fedsilo.client_app.site.audit_log import LedgerMark

_CLIENT_APP_RAISED = 2  # flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION

Answer = Callable[[Answering], RecordDict]
# A check of a message before it is answered, and of the answer before it leaves
Guard = Callable[[Answering], AbstractContextManager[None]]


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Answer with the facts that this site may tell of itself and its data; no sample leaves."""
    return _reply(message, context, _hello)


@app.query("survey")
def survey(message: Message, context: Context) -> Message:
    """Answer a survey of the data with counts that are large enough to leave.

    A real hospital repeats its first answer in every later survey.
    """
    return _reply(message, context, _summary)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one phase of a round: any phase of the run's method, or of secure aggregation."""
    return _reply(message, context, _phase)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the final model on this site's validation and test data."""
    return _reply(message, context, partial(_phase, final=True))


def _phase(answering: Answering, final: bool = False) -> RecordDict:
    """Answer a phase of a round, such as "train", or the final evaluation if ``final`` is True.

    A phase belongs to the method or to secure aggregation. A hospital that declares its data has
    only zero samples so far, and loads its real data here. It keeps the zeros in a phase of secure
    aggregation, such as the exchange of keys, which needs no data. Any other site has loaded its
    data before.
    """
    # Imported here and below, because only the first message needs PyTorch, not importing the app
    from fedsilo.client_app.answer import answer, evaluate, open_declared
    from fedsilo.client_app.lab import Lab
    from fedsilo.client_app.session import session_of

    content = answering.message.content
    instruction = Instruction.from_config(content[CONFIG], final)
    session = session_of(answering.context)
    if session.stand_in is not None and instruction.phase not in SECURING:
        session = open_declared(session, instruction, content, final)
    lab = Lab(session, content, instruction)
    if final:
        return evaluate(lab)
    return answer(lab)


def _hello(answering: Answering) -> RecordDict:
    """Answer a hello (the server's question before round 1) with facts about this site.

    The facts (``site_facts``) include the site's name, its task, its software and, unless the trust
    is 'sums', its label counts. The server's versions of fedsilo and Flower must match the site's.
    After this check the data are read anew, because they may have changed since an earlier run. The
    site's name precedes the text of any FedsiloError.
    """
    from fedsilo.client_app.hello import site_facts
    from fedsilo.client_app.session import session_of

    with _prefix_site(answering.context):
        refuse_other_versions(answering.message.content.config_records.get(CONFIG, {}))
        facts = site_facts(session_of(answering.context, again=True))
    return RecordDict({CONFIG: ConfigRecord(facts.to_config())})


def _summary(answering: Answering) -> RecordDict:
    """Answer a survey (a question about the data before a run) with counts that describe the data.

    The server's versions of fedsilo and Flower must match the site's, which is checked first. A
    hospital answers with only those counts that its site file allows, or refuses the survey. A
    simulated site answers with all counts. The site's name precedes the text of any FedsiloError.
    """
    from fedsilo.client_app.summary.survey_answer import answer_survey

    with _prefix_site(answering.context):
        refuse_other_versions(answering.message.content.config_records.get(CONFIG, {}))
        return answer_survey(answering.context, answering.rules)


@contextmanager
def _prefix_site(context: Context) -> Iterator[None]:
    """Put "<site's name>: " before the text of a FedsiloError raised in the ``with`` block.

    Before a run, at the hello or survey, the server does not yet know the name of the site that
    answers. The name is the node config's 'site' or, in a simulation, that of the simulated site.
    The error keeps its type. Other exceptions pass unchanged.
    """
    try:
        yield
    except FedsiloError as error:
        name = _own_name(context)
        # Some errors begin with the site, which would keep the server from joining equal reasons
        reason = str(error).removeprefix(f"site {name}: ")
        raise type(error)(f"{name}: {reason}") from None


def _reply(message: Message, context: Context, answer: Answer) -> Message:
    """Answer a message, and turn any exception on the way into an error reply.

    ``answer`` runs inside guards. A guard is a context manager that checks the message before
    ``answer`` runs, and may act again afterwards. From the outermost to the innermost they are:

    - With a site file (the hospital's own rules): ``enforce_site_file`` applies these rules, and
      ``require_newest_ledger`` refuses an outdated privacy ledger.
    - At any real site: ``hide_failure_in_sum`` hides a failure in a secret sum, and
      ``enforce_bounds`` applies the hospital's limits and quotas.

    After the guards, a site with a site file writes a line to its audit log. Finally a real site
    bundles the reply: the arrays of each record are joined into one.

    Args:
        message: the server's message.
        context: Flower's context of the node and the run.
        answer: builds the content of the reply.
    """
    simulated, ruled = is_simulated(context), "site-file" in context.node_config
    if simulated and SIMULATED_SITE in message.content:
        context = context_of_simulated_site(message, context)
    guards: list[Guard] = []
    if ruled:
        from fedsilo.client_app.privacy.ledger import require_newest_ledger
        from fedsilo.client_app.site.policy import enforce_site_file

        # Site file first: it decides whether the hospital answers at all, and adds its limits to
        # the node config that the later guards read
        guards += [enforce_site_file, require_newest_ledger]
    if not simulated:
        from fedsilo.client_app.site.bounds import enforce_bounds

        # Bounds are innermost, so that a quota used up after the data were opened also adds 0 to
        # the sum
        guards += [hide_failure_in_sum, enforce_bounds]
    answering = Answering(message, context)
    opened = answering.opened
    error: Exception | None = None
    with ExitStack() as around:
        if not simulated:
            around.enter_context(owner_only())
            around.enter_context(track_opening(opened))
        try:
            message.content = unbundle(message.content)
            with ExitStack() as passed:
                for guard in guards:
                    passed.enter_context(guard(answering))
                try:
                    answering.content = answer(answering)
                except (MemoryError, RuntimeError) as fault:
                    from fedsilo.client_app.training.memory import raise_memory_shortage

                    raise_memory_shortage(fault, context.run_config, message)
                    raise
            reply = Message(answering.content, reply_to=message)
        # No error may pass here: the server must learn of a site's failure
        except Exception as raised:
            error = raised
            reply = _failure(message, context, error, opened)
        if ruled:
            reply = _log(answering, context, reply, error)
        if not simulated and reply.has_content() and reply.content.array_records:
            reply.content = bundle(reply.content)
    return reply


@contextmanager
def hide_failure_in_sum(answering: Answering) -> Iterator[None]:
    """Let a site that fails after opening its data add 0 to the secret sum, instead of raising.

    Otherwise a malicious server could make the failure depend on a single patient, and see it.
    ``failed_answer`` builds the reply. The site's log and ``answering.opened.why`` get the real
    reason. The exception passes unchanged in three cases:

    - The run's trust is not 'sums'.
    - The message is a hello or a survey.
    - No data were opened.

    Before the ``with`` block runs, ``answering.opened.hidden`` is set. It is True if the server
    must not see any answer of this site alone (``tells_single_answers``).
    """
    message, context, opened = answering.message, answering.context, answering.opened
    opened.hidden = not tells_single_answers(context.node_config, context.run_config)
    try:
        yield
        return
    except Exception as error:  # every failure must happen inside the sum
        kind = message.metadata.message_type
        is_summed = context.run_config.get("privacy.trust") == SUMS and kind not in (HELLO, SURVEY)
        if not (is_summed and opened.data):
            raise
        opened.why = _reason(error, context)
        logging.getLogger("flwr").error(
            "fedsilo: could not answer, and added 0 to the sum: %s", " ".join(opened.why.split())
        )
    # After the block, so that the error and the memory that it holds are released
    from fedsilo.client_app.answer import failed_answer
    from fedsilo.client_app.session import session_of

    instruction = Instruction.from_config(message.content[CONFIG], final=kind == EVALUATE)
    answering.content = failed_answer(session_of(context), instruction, message.content)


def refuse(message: Message, context: Context, error: RefusedError) -> Message:
    """Build the error reply to a message that is refused without being read.

    The site's name precedes the text of ``error``. A site with a site file (the hospital's own
    rules) also writes a line to the audit log that the file names. If the file cannot be read, the
    log in 'state-dir' is used. If the line cannot be written, the reason is appended to the reply's
    text.
    """
    error = RefusedError(f"site {_own_name(context)}: {error}")
    reply = _failure(message, context, error, Opened())
    if "site-file" not in context.node_config:
        return reply
    from fedsilo.client_app.site.policy import read_site_file

    answering = Answering(message, context)
    with owner_only():
        with suppress(RefusedError):  # without readable rules the log is in 'state-dir'
            answering.rules = read_site_file(context)
        return _log(answering, context, reply, error)


def _failure(message: Message, context: Context, error: Exception, opened: Opened) -> Message:
    """Build the error reply to a message: an error code and a one-line reason.

    Usually they come from ``_code`` and ``_reason``. The exact reason is hidden if patients' data
    were opened and ``opened.hidden`` is True. The reply then has one fixed code and sentence for
    all errors, after the site's name and the round, and ``opened.why`` gets the reason. An
    EpsilonSpentError keeps its code and text even then. A real site always writes the full reason
    to its own log.
    """
    reason = _reason(error, context)
    if "site" in context.node_config:  # in a simulation the server's own log line is enough
        said = reason
        if isinstance(error, FedsiloError):
            said = str(error)
        logging.getLogger("flwr").error("fedsilo: %s", " ".join(said.split()))
    # Even the kind of an error can depend on one patient once the data were read
    if opened.data and opened.hidden:
        opened.why, error = reason, constant_error(error)
        if isinstance(error, WithheldError):
            reason = f"site {_own_name(context)}, round {_round_of(message)}: {error}"
    return Message(Error(_code(error), " ".join(reason.split())), reply_to=message)


def _own_name(context: Context) -> str:
    """Return the site's name; imported here, because reading settings needs PyTorch."""
    from fedsilo.client_app.site.identity import own_name

    return own_name(context)


def _round_of(message: Message) -> int:
    """Return the round number in a message's config; 0 if it is missing or not an integer."""
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    round_ = config.get("round", 0)
    if not isinstance(round_, int):
        return 0
    return round_


def _log(
    answering: Answering, context: Context, reply: Message, error: Exception | None
) -> Message:
    """Write the line about a message to the audit log, and return the reply to send.

    The line says whether the message was answered, refused (``error`` is a RefusedError) or failed.
    Once the line is written, ``reply`` is returned. If writing fails, no answer may be sent, and
    the result is an error reply:

    - If ``reply`` is an answer, an error reply with the code and text of the writing error takes
      its place.
    - If ``reply`` is an error reply, it keeps its code, and the text of the writing error is
      appended, unless both texts are equal.

    Args:
        answering: the message. If its ``opened.why`` is set, it is logged as the reason of a
            failure, even if the reply gives no reason.
        context: Flower's context as it arrived. It is not ``answering.context``, whose node config
            may have the site file's limits.
        reply: the reply that is about to leave.
        error: the exception that caused an error reply. With None there was no error.
    """
    from fedsilo.client_app.site import audit_log
    from fedsilo.client_app.site.policy import log_path

    message, outcome, why = answering.message, audit_log.ANSWERED, answering.opened.why
    if error or why:
        outcome = audit_log.FAILED
    if isinstance(error, RefusedError):
        outcome = audit_log.REFUSED
    site = _own_name(context)
    try:
        mark = _ledger_mark(context)
        line = audit_log.build_entry(site, message, context, reply, outcome, why, mark)
        audit_log.append_line(log_path(context, answering.rules), line)
    except Exception as unlogged:  # nothing may leave unlogged
        fault = f"site {site}: {_reason(unlogged, context)}"
        code, reason = _code(unlogged), fault
        if reply.has_error():
            # The refusal was for the missing log itself, so its text would only be repeated
            if reply.error.reason == fault:
                return reply
            code, reason = reply.error.code, f"{reply.error.reason}; {fault}"
        logging.getLogger("flwr").error("fedsilo: %s", fault)
        return Message(Error(code, reason), reply_to=message)
    return reply


def _ledger_mark(context: Context) -> "LedgerMark | None":
    """Return the state of the hospital's privacy ledger for the audit log; None without a ledger.

    The state maps "releases" to the number of noisy results in the ledger, and "sha256" to the
    digest of the ledger's file. For a damaged ledger the result is None too, and no error is
    raised. Such a ledger stops every noisy result, and the log must still get its line.
    """
    from fedsilo.client_app.privacy.ledger import ledger_mark

    try:
        return ledger_mark(context)
    except CheckpointError:
        return None


def _reason(error: Exception, context: Context) -> str:
    """Return the text that the server gets for an error, without a real site's paths.

    - A FileNamesError, whose text may quote names of the hospital's files, gets a constant text at
      a real site.
    - Any other FedsiloError keeps its text. At a real site the paths are removed from it.
    - The text of any other exception may quote a patient's value. Only its class and the system's
      reason, such as "disk full", are returned. The traceback goes to the log.
    """
    if isinstance(error, FileNamesError) and not is_simulated(context):
        return (
            f"site {_own_name(context)}: the data cannot be used; the site's own log says why, "
            "because names of its files may be patients'"
        )
    if isinstance(error, FedsiloError):
        from fedsilo.client_app.site.bounds import without_paths

        if is_simulated(context):
            return str(error)
        return without_paths(str(error), context)
    logging.getLogger("flwr").exception("fedsilo: a message could not be answered")
    # The text of a foreign error may quote a patient's value, and a file name may be one
    detail = ""
    if isinstance(error, OSError) and error.errno:
        detail = f": {os.strerror(error.errno)}"
    return f"{type(error).__name__}{detail} (its text is in the site's own log)"


def _code(error: Exception) -> int:
    """Return the code that tells the server the kind of error.

    Each kind of FedsiloError has a code in ``ERROR_CODES``. If a kind is missing there, the result
    is Flower's general code for an exception in a ClientApp. Any exception from outside fedsilo has
    this general code too.
    """
    if not isinstance(error, FedsiloError):
        return _CLIENT_APP_RAISED
    return ERROR_CODES.get(error.code, _CLIENT_APP_RAISED)
