"""A hospital's trust: one line of its site file, without which it takes no part.

A run states in its setting 'trust' which promise it makes. A hospital answers only a run whose
promise fits its own line. docs/threat-model.md explains what each level promises, and what it does
not.
"""

from collections.abc import Mapping

from fedsilo.core.errors import RefusedError
from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS, CommonSettings
from fedsilo.core.settings_schema import Value

MEANINGS: Mapping[str, str] = {
    SERVER: "the server's operator may see what this site alone answers",
    SUMS: "the server may learn sums over several sites, never what this site alone answers",
    NOBODY: "all that leaves is differentially private per patient, for any reader",
}


def refuse_distrusted(node_config: Mapping[str, Value], settings: CommonSettings) -> None:
    """Refuse a run that promises less than this hospital requires.

    Args:
        node_config: the node's, overridden by the site file's lines.
        settings: the run's settings.

    Raises:
        RefusedError: names the key, and what to set.
    """
    level = str(node_config.get("trust", ""))
    if level not in MEANINGS:
        choices = "; ".join(f"'trust: {name}': {said}" for name, said in MEANINGS.items())
        raise RefusedError(
            f"no line of the site file says whom the site trusts: add one of {choices}"
        )
    if level == SERVER:
        return
    if settings.trust != level:
        raise RefusedError(
            f"the site file says 'trust: {level}' ({MEANINGS[level]}), but the run is made for "
            f"'privacy.trust' '{settings.trust}': set that to '{level}', or leave the site out"
        )
    refuse_uncapped(level, bool(node_config.get("max-epsilon")))


def refuse_uncapped(level: str, capped: bool) -> None:
    """Refuse 'trust: nobody' without a cap on epsilon.

    Raises:
        RefusedError: names what to add.
    """
    if level == NOBODY and not capped:
        raise RefusedError(
            "the site file says 'trust: nobody', but has no 'max-epsilon': without a cap the run "
            "would decide how private the answers are; add 'max-epsilon' and 'delta'"
        )
