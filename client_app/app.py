"""The Flower ClientApp: it answers messages by the site's session, and turns errors into replies.

An error reply names site, round and reason, so that the server's failure policy can decide; the
traceback stays in the site's own log. A hospital with a site file obeys it, and each message gets a
line in its audit log before the reply leaves.

One rule for all errors is here too. Once patients' data have been opened, a hospital that does not
trust the server with single answers sends a constant text. In a secure sum it sends no error at
all: a site that could not answer adds 0, so the server learns only how many sites could not.
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
    for_simulated_site,
    is_simulated,
    owner_only,
    watching,
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
    """A ClientApp that logs and refuses every message of an unknown kind.

    Flower would also accept ``evaluate.default`` for ``evaluate``, but quotas and the audit log
    know only one name for each kind.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message of a known kind; refuse any other with a one-line reason."""
        if RENAMED.keys() & context.run_config.keys():  # a server with another app may send them
            try:
                current = with_current_keys(context.run_config, quietly=True)
            except SettingError as fault:  # a setting is given under both names
                return refuse(message, context, RefusedError(str(fault)))
            context = replace(context, run_config=current)
        kind = message.metadata.message_type
        if kind in _KINDS:
            return super().__call__(message, context)
        error = RefusedError(f"{quote_value(kind)} is no kind of message that a hospital answers")
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
    """Answer with this site's name and its silo's counts and fingerprints, without data."""
    return _reply(message, context, _hello)


@app.query("survey")
def survey(message: Message, context: Context) -> Message:
    """Answer with floored counts that describe the data; a repeated survey gets equal counts."""
    return _reply(message, context, _summary)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one phase of a round."""
    return _reply(message, context, _phase)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the final model."""
    return _reply(message, context, partial(_phase, final=True))


def _phase(answering: Answering, final: bool = False) -> RecordDict:
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
    from fedsilo.client_app.hello import site_facts
    from fedsilo.client_app.session import session_of

    with _naming_site(answering.context):
        refuse_other_versions(answering.message.content.config_records.get(CONFIG, {}))
        facts = site_facts(session_of(answering.context, again=True))
    return RecordDict({CONFIG: ConfigRecord(facts.to_config())})


def _summary(answering: Answering) -> RecordDict:
    from fedsilo.client_app.summary.survey_answer import answer_survey

    with _naming_site(answering.context):
        refuse_other_versions(answering.message.content.config_records.get(CONFIG, {}))
        return answer_survey(answering.context, answering.rules)


@contextmanager
def _naming_site(context: Context) -> Iterator[None]:
    """Put the site's name before an error, because the server does not know it yet."""
    try:
        yield
    except FedsiloError as error:
        raise type(error)(f"{_own_name(context)}: {error}") from None


def _reply(message: Message, context: Context, answer: Answer) -> Message:
    """Answer a message, and turn any failure into an error reply.

    A message passes the guards in order, and the answer passes them in reverse order. A site with a
    site file logs its answer. A real site's reply is bundled last, after all checks of what leaves.
    """
    simulated, ruled = is_simulated(context), "site-file" in context.node_config
    if simulated and SIMULATED_SITE in message.content:
        context = for_simulated_site(message, context)
    guards: list[Guard] = []
    if ruled:
        from fedsilo.client_app.privacy.ledger import by_newest_ledger
        from fedsilo.client_app.site.policy import under_site_file

        guards += [under_site_file, by_newest_ledger]
    if not simulated:
        from fedsilo.client_app.site.bounds import within_bounds

        guards += [failing_in_the_sum, within_bounds]
    answering = Answering(message, context)
    opened = answering.opened
    error: Exception | None = None
    with ExitStack() as around:
        if not simulated:
            around.enter_context(owner_only())
            around.enter_context(watching(opened))
        try:
            message.content = unbundle(message.content)
            with ExitStack() as passed:
                for guard in guards:
                    passed.enter_context(guard(answering))
                answering.content = answer(answering)
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
def failing_in_the_sum(answering: Answering) -> Iterator[None]:
    """Let the site add 0 to a secret sum if it fails after its data were opened.

    Otherwise the server would learn that this site failed, and it could make the failure depend on
    a single patient.
    """
    message, context, opened = answering.message, answering.context, answering.opened
    opened.hidden = not tells_single_answers(context.node_config, context.run_config)
    try:
        yield
        return
    except Exception as error:  # whatever fails must fail inside the sum
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
    """Refuse a message before any part of it is opened, and log the refusal."""
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
    """Turn an error into a reply; a real hospital's own log gets the full reason."""
    reason = _reason(error, context)
    if "site" in context.node_config:  # in a simulation the server's own log line is enough
        said = reason
        if isinstance(error, FedsiloError):
            said = str(error)
        logging.getLogger("flwr").error("fedsilo: %s", " ".join(said.split()))
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
    """Return the round that a message names; 0 if it names none."""
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    round_ = config.get("round", 0)
    if not isinstance(round_, int):
        return 0
    return round_


def _log(
    answering: Answering, context: Context, reply: Message, error: Exception | None
) -> Message:
    """Write the audit log's line, then return the reply; without the line, return an error.

    The line tells why the site did not answer, even if the reply does not. ``context`` is Flower's
    own, without the limits of the site file.
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
        line = audit_log.entry(site, message, context, reply, outcome, why, mark)
        audit_log.append_line(log_path(context, answering.rules), line)
    except Exception as unlogged:  # nothing may leave unlogged
        fault = f"site {site}: {_reason(unlogged, context)}"
        code, reason = _code(unlogged), fault
        if reply.has_error():
            if reply.error.reason == fault:
                return reply
            code, reason = reply.error.code, f"{reply.error.reason}; {fault}"
        logging.getLogger("flwr").error("fedsilo: %s", fault)
        return Message(Error(code, reason), reply_to=message)
    return reply


def _ledger_mark(context: Context) -> "LedgerMark | None":
    """Return the ledger's length and digest; None if it is missing or damaged.

    A damaged ledger already prevents the releases that depend on it, but their refusal must be
    logged.
    """
    from fedsilo.client_app.privacy.ledger import ledger_mark

    try:
        return ledger_mark(context)
    except CheckpointError:
        return None


def _reason(error: Exception, context: Context) -> str:
    """Return an error's text for the server, without a real site's paths and file names."""
    if isinstance(error, FileNamesError) and not is_simulated(context):
        return (
            f"site {_own_name(context)}: the data cannot be used; the site's own log says why, as "
            "names of its files may be patients'"
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
    """Return the number that tells the server the kind of an error."""
    if not isinstance(error, FedsiloError):
        return _CLIENT_APP_RAISED
    return ERROR_CODES.get(error.code, _CLIENT_APP_RAISED)
