"""Whether a message has opened the patients' data, and what then may leave of an error.

Before that an error depends on the run's settings and the hospital's rules, and is sent as it is.
After it even the fact that a certain error came can be an answer about one patient. So from there
on a hospital that does not trust the server with single answers sends a constant text, and the
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
    """Let ``opened`` see what the answer to one message does."""
    token = _message.set(opened)
    try:
        yield
    finally:
        _message.reset(token)


def note_opening() -> None:
    """Note that patients' data are read from here on; called before the first byte is."""
    if opened := _message.get():
        opened.data = True


def forget_opening() -> None:
    """Note that what follows depends only on what the hospital has declared of its data."""
    if opened := _message.get():
        opened.data = False


def tells_single_answers(node_config: Mapping[str, Value], run: Mapping[str, Value]) -> bool:
    """Tell whether the server may see what this site alone answers, errors included.

    Args:
        node_config: the node's, with the site file's lines over it.
        run: the run's settings.
    """
    capped = bool(node_config.get("max-epsilon"))
    levels = {str(node_config.get("trust", SERVER)), str(run.get("trust", SERVER))}
    return levels == {SERVER} and not capped


def constant_error(error: Exception) -> FedsiloError:
    """Choose what leaves in place of an error that may depend on a patient.

    What the ledger refuses follows from what was asked and from counts that have noise: its text
    leaves as it is, because a server plans by it.
    """
    if isinstance(error, EpsilonSpentError):
        return EpsilonSpentError(str(error))
    return WithheldError("this site could not answer; its own log says why")
