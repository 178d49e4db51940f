"""Answer one message in a separate process with the installed app.

It handles a task like Flower's ``flwr-clientapp``, except that the app received with the run is
only compared, not executed.
"""

import logging
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsilo.client_app.app import app, refuse
from fedsilo.core.errors import RefusedError
from fedsilo.deployment.worker.installed import InstalledApp

Answer = Callable[[Message, Context, bytes], Message]


def runtime_client(
    address: str, component: str, interceptor: Any, **options: Any
) -> RuntimeHttpClient:
    """Return a client of the SuperNode's Runtime API that presents itself as ``component``."""
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # it stays on the loopback
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), interceptor],
        **options,
    )


def answer_task(address: str, token: str, answer: Answer) -> bool:
    """Fetch a task's message from the SuperNode and answer it; tell whether a reply was sent.

    Args:
        address: the address of the SuperNode's Runtime API, on the loopback.
        token: identifies the task at the SuperNode.
        answer: makes a reply from the message, the context and the run's app.
    """
    by_token, retrying = RuntimeTokenHttpInterceptor(token), make_simple_http_retry_invoker()
    client = runtime_client(address, "flwr-clientapp", by_token, retry_invoker=retrying)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context, status, details = None, SubStatus.FAILED, "the task was not answered"
    try:
        message, context, _, fab = pull_task_input(client)
        reply = _answer(message, context, fab.content, answer)
        push_message(client, reply, context)
        status, details = SubStatus.COMPLETED, ""
    except Exception:  # no error may pass here: the SuperNode must hear that the task has ended
        logging.getLogger("flwr").exception("fedsilo: a task could not be answered")
    finally:
        push_task_output(client=client, context=context, sub_status=status, details=details)
        heartbeat.stop()
        client.close()
    return status == SubStatus.COMPLETED


def _answer(message: Message, context: Context, bundle: bytes, answer: Answer) -> Message:
    """Answer a message; an uncaught error becomes an error reply without the error's text."""
    try:
        return answer(message, context, bundle)
    except Exception as error:
        logging.getLogger("flwr").exception("fedsilo: a message could not be answered")
        reason = f"{type(error).__name__} (its text is in the site's own log)"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def answer_by(installed: InstalledApp) -> Answer:
    """Return a function that answers a message with the installed app.

    If the run's app is another one, it answers with a refusal.
    """

    def answer(message: Message, context: Context, bundle: bytes) -> Message:
        try:
            installed.refuse_other(bundle)
        except RefusedError as error:
            return refuse(message, context, error)
        return app(message=message, context=context)

    return answer
