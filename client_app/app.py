"""The Flower ClientApp: four message kinds, handed to the method of the run config.

Whatever fails at a site becomes an error reply that names site, round and reason, so that the
server's failure policy can decide; the traceback stays in the site's own log. A hospital that has
a site file answers under it, and each message has a line in its audit log before the reply leaves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsilo.models.contract.errors import ERROR_CODES, FedsiloError, RefusedError
from fedsilo.models.contract.messages import CONFIG
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.contract.versions import refuse_other_versions
from fedsilo.strategies.wire.bundles import bundle, unbundle

if TYPE_CHECKING:
    from fedsilo.client_app.opening import Site

app = ClientApp()

_CLIENT_APP_RAISED = 2  # flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION

Answer = Callable[[Message, Context], RecordDict]


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say who this site is and what its silo holds: counts and fingerprints, no data."""
    return _reply(message, context, _hello)


@app.query("survey")
def survey(message: Message, context: Context) -> Message:
    """Say what the data are like: floored counts, the same whatever is asked again."""
    return _reply(message, context, _survey)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a phase of a round."""
    return _reply(message, context, _train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the final model."""
    return _reply(message, context, _evaluate)


def refuse(message: Message, context: Context, error: RefusedError) -> Message:
    """Refuse a message before anything of it is opened; the audit log tells of it."""
    from fedsilo.client_app.site.audit_log import REFUSED
    from fedsilo.client_app.site.identity import own_name

    reason = f"site {own_name(context)}: {_reason(error, context)}"
    _own_log(context, reason)
    reply = _failure(message, reason, _code(error))
    return _kept(message, context, reply, REFUSED) if "site-file" in context.node_config else reply


def _reply(message: Message, context: Context, answer: Answer) -> Message:
    """Answer; what a real site sends is bundled last, when all that leaves has been looked at."""
    reply = _logged(message, context, answer)
    if reply.has_content() and reply.content.array_records:
        from fedsilo.client_app.site.node import is_simulated

        if not is_simulated(context):
            reply.content = bundle(reply.content)
    return reply


def _logged(message: Message, context: Context, answer: Answer) -> Message:
    """Answer, a real site within its bounds; where it has a site file, under it and logged."""
    from fedsilo.client_app.site.node import is_simulated

    if not is_simulated(context):
        from fedsilo.client_app.site.bounds import answer_within_bounds

        answer = partial(answer_within_bounds, answer)
    if "site-file" not in context.node_config:
        return _attempt(message, context, answer)[0]
    from fedsilo.client_app.site.policy import answer_under

    return _kept(message, context, *_attempt(message, context, partial(answer_under, answer)))


def _kept(message: Message, context: Context, reply: Message, outcome: str) -> Message:
    """Return a reply once its line stands in the audit log; without the line an error."""
    from fedsilo.client_app.site.audit_log import append_line, entry
    from fedsilo.client_app.site.identity import own_name
    from fedsilo.client_app.site.policy import audit_log

    site = own_name(context)
    try:
        append_line(audit_log(context), entry(site, message, context, reply, outcome))
    except Exception as error:  # the same boundary: nothing leaves unlogged
        fault = f"site {site}: {_reason(error, context)}"
        before = [reply.error.reason] if reply.has_error() else []
        if fault not in before:
            _own_log(context, fault)
            code = reply.error.code if reply.has_error() else _code(error)
            reply = _failure(message, "; ".join([*map(str, before), fault]), code)
    return reply


def _attempt(message: Message, context: Context, answer: Answer) -> tuple[Message, str]:
    """Return the reply, and whether it is an answer, the site's refusal or its failure."""
    from fedsilo.client_app.site.audit_log import ANSWERED, FAILED, REFUSED

    try:
        message.content = unbundle(message.content)
        return Message(answer(message, context), reply_to=message), ANSWERED
    except Exception as error:  # the boundary: a site's failure must reach the server as a reply
        reason = _reason(error, context)
        _own_log(context, str(error) if isinstance(error, FedsiloError) else reason)
        outcome = REFUSED if isinstance(error, RefusedError) else FAILED
        return _failure(message, reason, _code(error)), outcome


def _reason(error: Exception, context: Context) -> str:
    """Return what the server is told of an error; of a real site's paths nothing."""
    if isinstance(error, FedsiloError):
        from fedsilo.client_app.site.bounds import without_paths
        from fedsilo.client_app.site.node import is_simulated

        return str(error) if is_simulated(context) else without_paths(str(error), context)
    logging.getLogger("flwr").exception("fedsilo: a message could not be answered")
    # A foreign error's text may quote a patient's value, and a file's name may be one
    detail = f": {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else ""
    return f"{type(error).__name__}{detail} (its text stands in the site's own log)"


def _code(error: Exception) -> int:
    """Return the number by which the server knows the kind of an error."""
    kind = error.code if isinstance(error, FedsiloError) else ""
    return ERROR_CODES.get(kind, _CLIENT_APP_RAISED)


def _failure(message: Message, reason: str, code: int) -> Message:
    return Message(Error(code, " ".join(reason.split())), reply_to=message)


def _own_log(context: Context, reason: str) -> None:
    """Tell a real hospital too why it did not answer; in a simulation the server's line will do."""
    if "site" in context.node_config:
        logging.getLogger("flwr").error("fedsilo: %s", " ".join(reason.split()))


def _hello(message: Message, context: Context) -> RecordDict:
    from fedsilo.client_app.opening import admit, open_site
    from fedsilo.client_app.site.identity import who_is

    try:
        refuse_other_versions(message.content.config_records.get(CONFIG, {}))
        site = open_site(context)
        admit(site, context)
        facts = site_facts(site)
    except FedsiloError as error:
        # The server does not know yet whom it asks: the name must be in the answer
        raise type(error)(f"{who_is(context)}: {error}") from None
    return RecordDict({CONFIG: ConfigRecord(facts.to_config())})


def _survey(message: Message, context: Context) -> RecordDict:
    from fedsilo.client_app.site.identity import who_is
    from fedsilo.client_app.survey.question import answer_survey

    try:
        refuse_other_versions(message.content.config_records.get(CONFIG, {}))
        return answer_survey(context)
    except FedsiloError as error:
        raise type(error)(f"{who_is(context)}: {error}") from None


def site_facts(site: Site) -> SiteFacts:
    """Return what the site says of itself at the start of a run.

    Raises:
        SiteError: its rows are too few for the sums that the run asks for, or it refuses to send
            any.
        SettingError: the weights of its network are missing.
    """
    silo = site.silo
    return SiteFacts(
        site=silo.name,
        distribution=silo.distribution,
        input_shape=silo.task.input_shape,
        classes=silo.task.classes,
        label_counts=silo.label_counts(),
        fingerprints=silo.fingerprints,
        simulated=site.simulated,
        features=silo.features,
        sums=site.sums(),
        dropped=silo.dropped,
        schema=silo.schema,
        backbone=site.backbone(),
        class_names=silo.classes,
        floor=site.settings.sums_min_count,
        measured=site.measured(),
        software=site.software(),
    )


def _train(message: Message, context: Context) -> RecordDict:
    from fedsilo.client_app.opening import open_round

    return open_round(message, context).answer()


def _evaluate(message: Message, context: Context) -> RecordDict:
    from fedsilo.client_app.opening import open_round

    return open_round(message, context).measure_only()
