"""Whether a message has opened patients' data, and which errors may leave afterwards.

Before the data are opened, an error depends only on the run's settings and the hospital's rules,
and is sent unchanged. Afterwards even the kind of an error can reveal something about one patient.
So a hospital that does not trust the server with single answers then sends a constant text, and the
whole text stays in its own logs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from fedsilo.client_app.site.node import Opened
from fedsilo.models.contract.errors import EpsilonSpentError, FedsiloError, WithheldError
from fedsilo.models.contract.settings import SERVER
from fedsilo.models.contract.settings_schema import Value

_message: ContextVar[Opened | None] = ContextVar("message", default=None)


@contextmanager
def watching(opened: Opened) -> Iterator[None]:
    """Let ``opened`` record, within the block, what the answer to one message does."""
    token = _message.set(opened)
    try:
        yield
    finally:
        _message.reset(token)


def note_opening() -> None:
    """Record that patients' data are read from here on; called before the first byte is read."""
    if opened := _message.get():
        opened.data = True


def forget_opening() -> None:
    """Record that the following depends only on the hospital's declaration of its data."""
    if opened := _message.get():
        opened.data = False


def tells_single_answers(node_config: Mapping[str, Value], run: Mapping[str, Value]) -> bool:
    """Tell whether the server may see this site's own answers, including its errors.

    Args:
        node_config: the node's, overridden by the site file's lines.
        run: the run's settings.
    """
    capped = bool(node_config.get("max-epsilon"))
    levels = {str(node_config.get("trust", SERVER)), str(run.get("privacy.trust", SERVER))}
    return levels == {SERVER} and not capped


def constant_error(error: Exception) -> FedsiloError:
    """Return the error to send in place of one that may depend on a patient.

    An error of the ledger depends only on the request and on noisy counts, so its text is sent
    unchanged, because a server plans with it.
    """
    if isinstance(error, EpsilonSpentError):
        return EpsilonSpentError(str(error))
    return WithheldError("this site could not answer; its own log says why")
