"""Which errors may leave a site, before and after a message has opened patients' data.

Before the data are opened, an error depends only on the run's settings and the hospital's rules,
and is sent unchanged. Afterwards even the kind of an error can reveal something about one patient.
So a hospital that does not trust the server with single answers then sends a constant text, and the
whole text stays in its own logs.
"""

from collections.abc import Mapping

from fedsilo.core.errors import EpsilonSpentError, FedsiloError, WithheldError
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.core.settings_schema import Value


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
