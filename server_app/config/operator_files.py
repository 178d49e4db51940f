"""The files by which the server's operator binds names to keys and fixes what sites weigh.

The registry, that $FEDSILO_SITE_REGISTRY names, holds of each site the node that its key was
registered as: ``{"north": {"node-id": "123", "key": "SHA256:..."}}``. It is not a setting, as who
starts a run chooses those. ``site-weights`` names a file of training samples agreed beforehand:
``{"north": 200}``. Both are JSON or YAML, and checked before any site is asked.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from fedsilo.datasets.io.declarations import FileModel, check_content, misfit, whole
from fedsilo.datasets.io.yaml_text import read_yaml
from fedsilo.datasets.silo.declared_silos import SiteName
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.meeting.admission import AgreedWeights, Registry, Terms

REGISTRY = "FEDSILO_SITE_REGISTRY"
_MOST = 10**9  # training samples


def _node(value: Any) -> str:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 20 or int(text) >= 2**64:
        raise misfit("must be a node's number")
    return str(int(text))


def _fingerprint(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise misfit("must be a key's fingerprint")
    return value.strip()


class _Entry(FileModel):
    """What the registry says of a site."""

    node_id: Annotated[str, BeforeValidator(_node)]
    key: Annotated[str, BeforeValidator(_fingerprint)]


def operator_terms(common: CommonSettings) -> Terms:
    """Return the terms that the operator's files state; SettingError if one cannot be used."""
    registry, weights = os.environ.get(REGISTRY, ""), common.site_weights
    return Terms(
        read_registry(Path(registry).expanduser()) if registry else None,
        read_weights(Path(weights).expanduser()) if weights else None,
    )


def read_registry(path: Path) -> Registry:
    """Return which node is which site.

    Raises:
        SettingError: it cannot be read, has other keys, or has one node or key under two names.
    """
    nodes = {site: int(entry.node_id) for site, entry in _registered(path).items()}
    return Registry(str(path), nodes)


def registered_keys(path: Path) -> Mapping[str, str]:
    """Return the fingerprint of each site's key; errors as ``read_registry``."""
    return {site: entry.key for site, entry in _registered(path).items()}


def read_weights(path: Path) -> AgreedWeights:
    """Return the training samples agreed for each site; SettingError if the file cannot be used."""
    return AgreedWeights(str(path), _by_site(path, Annotated[int, whole(1, _MOST)]))


def _registered(path: Path) -> Mapping[str, _Entry]:
    """Return the registry's entries, in which no node and no key has two names."""
    entries: dict[str, _Entry] = _by_site(path, _Entry)
    for part in ("node_id", "key"):
        owner: dict[str, str] = {}
        for site, entry in entries.items():
            first = owner.setdefault(getattr(entry, part), site)
            if first != site:
                raise SettingError(
                    f"{path} has one {part.replace('_', '-')} under two names, '{first}' and "
                    f"'{site}': each hospital needs a key of its own"
                )
    return entries


def _by_site(path: Path, kind: Any) -> Any:
    """Return what ``path`` has of each site, each of a ``kind``."""
    content = read_yaml(path, SettingError)
    return check_content(
        dict[SiteName, kind], content, lambda said: SettingError(f"{path}: {said}")
    )
