"""A hospital's trust: one line of its site file. Without this line the hospital takes no part.

A run states in its setting 'privacy.trust' which promise it makes. A hospital answers only a run
whose promise fits its own line. docs/threat-model.md explains what each level promises, and what it
does not.

The level also decides which errors may leave. Before the data are opened, an error depends only on
the run's settings and the hospital's rules, and is sent unchanged. Afterwards even the kind of an
error can reveal something about one patient. So a hospital that does not trust the server with
single answers then sends a constant text, and the whole text stays in its own logs.
"""

from collections.abc import Mapping

from fedsilo.core.errors import EpsilonSpentError, FedsiloError, RefusedError, WithheldError
from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS, CommonSettings
from fedsilo.core.settings_schema import Value

MEANINGS: Mapping[str, str] = {
    SERVER: "the server's operator may see what this site alone answers",
    SUMS: "the server may learn sums over several sites, never what this site alone answers",
    NOBODY: "all that leaves is differentially private per patient, for any reader",
}


def refuse_distrusted(node_config: Mapping[str, Value], settings: CommonSettings) -> None:
    """Check that the run's level of trust fits this hospital's 'trust'.

    There are three levels. With 'server' the server may see a site's own answers. With 'sums' it
    may see only sums over sites. With 'nobody' it may see only differentially private answers. A
    hospital with level 'server' accepts every run. A hospital with another level accepts only runs
    of exactly this level.

    Args:
        node_config: the node's config with the site file's limits.
        settings: the run's settings.

    Raises:
        RefusedError: the hospital has no valid 'trust', the run has another level, or the
            hospital's level is 'nobody' without a cap on epsilon. The error says which setting to
            change.
    """
    level, fault = str(node_config.get("trust", "")), ""
    if level not in MEANINGS:
        choices = "; ".join(f"'trust: {name}': {said}" for name, said in MEANINGS.items())
        fault = f"the site file does not say whom the site trusts: add one of {choices}"
    elif level not in (SERVER, settings.trust):
        fault = (
            f"the site file says 'trust: {level}' ({MEANINGS[level]}), but the run is made for "
            f"'privacy.trust' '{settings.trust}': set that to '{level}', or leave the site out"
        )
    if fault:
        raise RefusedError(fault)
    refuse_uncapped(level, bool(node_config.get("max-epsilon")))


def refuse_uncapped(level: str, capped: bool) -> None:
    """Check that a hospital with 'trust: nobody' has a cap on epsilon.

    Such a hospital accepts only private runs. Without a cap, each run would decide how private the
    hospital's answers are.

    Args:
        level: the hospital's level of trust.
        capped: whether the hospital has a cap on epsilon.

    Raises:
        RefusedError: the level is 'nobody' but the hospital has no cap.
    """
    if level == NOBODY and not capped:
        raise RefusedError(
            "the site file says 'trust: nobody', but has no 'max-epsilon': without a cap the run "
            "would decide how private the answers are; add 'max-epsilon' and 'delta'"
        )


def tells_single_answers(node_config: Mapping[str, Value], run: Mapping[str, Value]) -> bool:
    """Tell whether the server may see the answers of this site alone, including its error texts.

    The result is True only if the hospital and the run both have trust 'server', and the hospital
    has no cap on epsilon. A missing level of trust counts as 'server'.

    Args:
        node_config: the node's config with the site file's limits.
        run: the run's settings by key.
    """
    capped = bool(node_config.get("max-epsilon"))
    levels = {str(node_config.get("trust", SERVER)), str(run.get("privacy.trust", SERVER))}
    return levels == {SERVER} and not capped


def constant_error(error: Exception) -> FedsiloError:
    """Replace an error whose text may reveal a patient by an error that may leave the site.

    The result is a WithheldError with a constant text. Only an EpsilonSpentError keeps its text,
    because it tells the server that the site's epsilon is spent. Its text depends on the request
    and on noisy counts, but not on a single patient.
    """
    if isinstance(error, EpsilonSpentError):
        return EpsilonSpentError(str(error))
    return WithheldError("this site could not answer; its own log says why")
