"""One message, answered in a process of its own by the installed app.

What Flower's ``flwr-clientapp`` does with a task, but for one thing: the app that came with the run
is compared, not run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from threading import Thread
from time import sleep

import psutil
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsilo.client_app.app import app, refuse
from fedsilo.client_app.worker.installed import InstalledApp
from fedsilo.models.contract.errors import RefusedError

_LOOK = 0.5  # seconds from one look for the hospital's process to the next

Answer = Callable[[Message, Context, bytes], Message]


def answer_task(address: str, token: str, answer: Answer) -> bool:
    """Take a task's message from the SuperNode, answer it, and give the reply back.

    Args:
        address: of the SuperNode's Runtime API, on the loopback.
        token: by which the SuperNode knows the task.
        answer: makes a reply of message, context and the run's app.

    Returns:
        Whether a reply was given back.
    """
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # it is the loopback
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context, status, details = None, SubStatus.FAILED, "the task was not answered"
    try:
        message, context, _, fab = pull_task_input(client)
        reply = _answered(message, context, fab.content, answer)
        push_message(client, reply, context)
        status, details = SubStatus.COMPLETED, ""
    except Exception:  # the boundary: the SuperNode must hear that the task has ended
        logging.getLogger("flwr").exception("fedsilo: a task could not be answered")
    finally:
        push_task_output(client=client, context=context, sub_status=status, details=details)
        heartbeat.stop()
        client.close()
    return status == SubStatus.COMPLETED


def _answered(message: Message, context: Context, bundle: bytes, answer: Answer) -> Message:
    """Answer; what the app does not catch itself becomes an error without its text."""
    try:
        return answer(message, context, bundle)
    except Exception as error:
        logging.getLogger("flwr").exception("fedsilo: a message could not be answered")
        reason = f"{type(error).__name__} (its text is in the site's own log)"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def answer_by(installed: InstalledApp) -> Answer:
    """Return what answers by the installed app, and only a run whose app is the same."""

    def answer(message: Message, context: Context, bundle: bytes) -> Message:
        try:
            installed.refuse_other(bundle)
        except RefusedError as error:
            return refuse(message, context, error)
        return app(message=message, context=context)

    return answer


def end_with(hospital: int) -> None:
    """See to it that this process ends when the hospital's does, whatever becomes of the worker."""
    try:
        process = psutil.Process(hospital)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            sleep(_LOOK)
        sys.stderr.flush()
        os._exit(1)

    Thread(target=watch, name="end-with-hospital", daemon=True).start()
