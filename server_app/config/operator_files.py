"""The server operator's files, which bind site names to keys and fix the sites' weights.

The registry, a file that $FEDSILO_SITE_REGISTRY names, has for each site the node id that its key
was registered under: ``{"north": {"node-id": "123", "key": "SHA256:..."}}``. The registry is not a
setting, because whoever starts a run chooses the settings. The setting 'run.site-weights' names a
file with the number of training samples agreed for each site: ``{"north": 200}``. Both files are
JSON or YAML, and are checked before any site is asked.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from fedsilo.core.errors import SettingError
from fedsilo.core.files.declarations import FileModel, check_content, misfit, whole
from fedsilo.core.files.yaml_text import read_yaml
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.declared_silos import SiteName
from fedsilo.strategies.meeting.terms import AgreedWeights, Registry, Terms

REGISTRY = "FEDSILO_SITE_REGISTRY"
_MOST = 10**9  # training samples


def _check_node(value: Any) -> str:
    text = str(value)
    # YAML and JSON read a node as a number or a text; a node id is an unsigned 64-bit number
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 20 or int(text) >= 2**64:
        raise misfit("must be a node's number")
    return str(int(text))


def _check_fingerprint(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise misfit("must be a key's fingerprint")
    return value.strip()


class _Entry(FileModel):
    """The registry's entry for one site."""

    node_id: Annotated[str, BeforeValidator(_check_node)]
    key: Annotated[str, BeforeValidator(_check_fingerprint)]


def operator_terms(common: CommonSettings) -> Terms:
    """Read the server operator's two files: the registry of sites and the file of sample numbers.

    The variable $FEDSILO_SITE_REGISTRY names the registry, which has the node id of each site. The
    setting 'run.site-weights' names the other file, which has the agreed number of training samples
    of each site. A '~' at the start of a path is expanded.

    Returns:
        The conditions for a site to take part. ``registry`` and ``weights`` have the content of the
        files. Each is None if its file is not named.

    Raises:
        SettingError: a named file cannot be used.
    """
    registry, weights = None, None
    named = os.environ.get(REGISTRY, "")
    if named:
        registry = read_registry(Path(named).expanduser())
    if common.site_weights:
        weights = read_weights(Path(common.site_weights).expanduser())
    return Terms(registry, weights)


def read_registry(path: Path) -> Registry:
    """Read the node id of each site from the registry file.

    The file also has the fingerprint of each site's public key, which is checked but not returned.

    Returns:
        The registry: ``path`` is the path of the file, and ``nodes`` maps site names to node ids.

    Raises:
        SettingError: the file cannot be read, has unknown keys or invalid values, or has the same
            node id or the same fingerprint under two site names.
    """
    nodes = {}
    for site, entry in _read_entries(path).items():
        nodes[site] = int(entry.node_id)
    return Registry(str(path), nodes)


def registered_keys(path: Path) -> Mapping[str, str]:
    """Read the fingerprint of each site's public key from the registry: site -> fingerprint.

    Raises:
        SettingError: the registry cannot be read, has invalid content, or names one node or key
            twice.
    """
    return {site: entry.key for site, entry in _read_entries(path).items()}


def read_weights(path: Path) -> AgreedWeights:
    """Read the number of training samples that was agreed for each site before the run.

    The file is YAML or JSON, and maps each site's name to a whole number from 1 to 10^9. The
    numbers become the sites' weights. A site must not report more training samples than its number.

    Returns:
        The agreement: ``path`` is the path of the file, and ``samples`` maps site names to numbers.

    Raises:
        SettingError: the file cannot be read, or a site name or a number is invalid.
    """
    return AgreedWeights(str(path), _read_by_site(path, Annotated[int, whole(1, _MOST)]))


def _read_entries(path: Path) -> Mapping[str, _Entry]:
    """Read the registry file: site -> its entry, which has a node id and a key's fingerprint.

    Two sites with the same node id or key are refused. Otherwise one hospital could take part
    twice.

    Raises:
        SettingError: the file cannot be used, or two sites have the same node id or the same key.
            Only the first such pair is named.
    """
    entries: dict[str, _Entry] = _read_by_site(path, _Entry)
    for part in ("node_id", "key"):
        owner: dict[str, str] = {}
        for site, entry in entries.items():
            # One hospital under two names would have two votes
            first = owner.setdefault(getattr(entry, part), site)
            if first != site:
                raise SettingError(
                    f"{path} has the same {part.replace('_', '-')} under two names, '{first}' and "
                    f"'{site}': each hospital needs its own key"
                )
    return entries


def _read_by_site(path: Path, kind: Any) -> Any:
    """Read a YAML or JSON file that maps site names to values of type ``kind``.

    Args:
        path: the file, which must hold a mapping.
        kind: the type of the values, which pydantic checks.

    Returns:
        Site -> value, in the order of the file.

    Raises:
        SettingError: the file cannot be read, a key is not allowed as a site name, or a value is
            not of type ``kind``.
    """
    content = read_yaml(path, SettingError)
    return check_content(
        dict[SiteName, kind], content, lambda said: SettingError(f"{path}: {said}")
    )
