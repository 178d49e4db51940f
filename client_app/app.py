"""The Flower ClientApp: three message kinds, handed to the method of the run config.

Whatever fails at a site becomes an error reply that names site, round and reason, so that the
server's failure policy can decide; the traceback stays in the site's own log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from models.contract import CONFIG
from models.errors import FedsiloError, SiteError

app = ClientApp()

_CLIENT_APP_RAISED = 2  # flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION

Answer = Callable[[Message, Context], RecordDict]


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say who this site is and what its silo holds: counts and fingerprints, no data."""
    return _reply(message, context, _hello)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a phase of a round."""
    return _reply(message, context, _train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the final model."""
    return _reply(message, context, _evaluate)


def _reply(message: Message, context: Context, answer: Answer) -> Message:
    try:
        return Message(answer(message, context), reply_to=message)
    except FedsiloError as error:
        reason = str(error)
    except Exception as error:  # the boundary: a site's failure must reach the server as a reply
        logging.getLogger("flwr").exception("fedsilo: a message could not be answered")
        # A foreign error's text may quote a patient's value
        reason = f"{type(error).__name__} (its text stands in the site's own log)"
    return Message(Error(_CLIENT_APP_RAISED, " ".join(reason.split())), reply_to=message)


def _hello(_: Message, context: Context) -> RecordDict:
    from client_app.site import admit, open_site, who_is

    try:
        site = open_site(context)
        admit(site, context)
        silo, sums, backbone = site.silo, site.sums(), site.backbone()
    except FedsiloError as error:
        # The server does not know yet whom it asks: the name must be in the answer
        raise SiteError(f"{who_is(context)}: {error}") from None
    facts: dict[str, Any] = {
        "site": silo.name,
        "distribution": silo.distribution,
        "input-shape": list(silo.task.input_shape),
        "classes": silo.task.classes,
        "label-counts": json.dumps(silo.label_counts()),
        "fingerprints": json.dumps(silo.fingerprints),
        "homeless": site.simulated,
        "features": json.dumps(silo.features),
        "dropped": silo.dropped,
        "schema": silo.schema,
        "backbone": backbone,
        "class-names": json.dumps(silo.classes),
        "floor": site.settings.sums_min_count,
    }
    if sums is not None:
        facts |= {f"sums-{part}": values.tolist() for part, values in vars(sums).items()}
    return RecordDict({CONFIG: ConfigRecord(facts)})


def _train(message: Message, context: Context) -> RecordDict:
    from client_app.site import open_method

    return open_method(message, context).answer()


def _evaluate(message: Message, context: Context) -> RecordDict:
    from client_app.site import open_method

    return open_method(message, context).measure_only()
