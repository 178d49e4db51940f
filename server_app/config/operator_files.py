"""The files by which the server's operator binds names to keys and fixes what sites weigh.

The registry, that $FEDSILO_SITE_REGISTRY names, holds of each site the node that its key was
registered as: ``{"north": {"node-id": "123", "key": "SHA256:..."}}``. It is no setting, as who
starts a run chooses those. ``site-weights`` names a file of training samples agreed beforehand:
``{"north": 200}``. Both are JSON or YAML, and nobody is asked before they are found to be right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedsilo.datasets.io.text_files import file_fault
from fedsilo.datasets.silo.site_names import site_name_fault
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.meeting.admission import AgreedWeights, Registry, Terms

REGISTRY = "FEDSILO_SITE_REGISTRY"
_MOST = 10**9  # training samples
_NODES = 2**64
T = TypeVar("T")


def operator_terms(common: CommonSettings) -> Terms:
    """Return the terms that the operator's files state.

    Raises:
        SettingError: a file cannot be read, or one of them says what cannot be.
    """
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
    entries = _registered(path)
    return Registry(str(path), {site: int(entry["node-id"]) for site, entry in entries.items()})


def registered_keys(path: Path) -> Mapping[str, str]:
    """Return the fingerprint of each site's key; errors as ``read_registry``."""
    return {site: entry["key"] for site, entry in _registered(path).items()}


def _registered(path: Path) -> Mapping[str, dict[str, str]]:
    """Return the registry's entries, in which no node and no key has two names."""
    entries = _entries(path, _entry)
    for part in ("node-id", "key"):
        owner: dict[str, str] = {}
        for site, entry in entries.items():
            first = owner.setdefault(entry[part], site)
            if first != site:
                raise SettingError(
                    f"{path} has one {part} under two names, '{first}' and '{site}': each hospital "
                    "needs a key of its own"
                )
    return entries


def read_weights(path: Path) -> AgreedWeights:
    """Return the training samples agreed for each site.

    Raises:
        SettingError: it cannot be read, or a value is no whole number above 0.
    """

    def count(value: Any) -> int:
        if type(value) is not int or not 0 < value <= _MOST:
            raise ValueError(f"is no whole number from 1 to {_MOST}")
        return value

    return AgreedWeights(str(path), _entries(path, count))


def _entry(value: Any) -> dict[str, str]:
    """Return a site's entry in the registry: node and key as texts."""
    if not isinstance(value, dict) or value.keys() != {"node-id", "key"}:
        raise ValueError("must have 'node-id' and 'key' and nothing else")
    node, key = value["node-id"], value["key"]
    whole = isinstance(node, int | str) and not isinstance(node, bool) and str(node).isdecimal()
    if not whole or len(str(node)) > len(str(_NODES)) or int(node) >= _NODES:
        raise ValueError("has no node's number as its 'node-id'")
    if not isinstance(key, str) or not key.strip():
        raise ValueError("has no fingerprint as its 'key'")
    return {"node-id": str(int(node)), "key": key.strip()}


def _entries(path: Path, read: Callable[[Any], T]) -> Mapping[str, T]:
    """Return what ``path`` has of each site.

    Raises:
        SettingError: it cannot be read, is no mapping of names, or ``read`` refuses an entry.
    """
    entries: dict[str, T] = {}
    for site, value in _mapping(path).items():
        fault = site_name_fault(site) if isinstance(site, str) else "a site's name is no text"
        if fault:
            raise SettingError(f"{path}: {one_line(fault, 200)}")
        try:
            entries[site] = read(value)
        except ValueError as error:
            raise SettingError(f"{path}: the entry of site '{site}' {error}") from None
    return entries


def _mapping(path: Path) -> Mapping[Any, Any]:
    from fedsilo.datasets.io.declarations import YamlError, parse_yaml  # takes a while to import

    if fault := file_fault(path):
        raise SettingError(f"{path} {fault}")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingError(f"{path} is no text in UTF-8") from None
    except YamlError as error:
        raise SettingError(error.of(str(path))) from None
    if not isinstance(content, dict):
        raise SettingError(f"{path} must be a mapping of the sites' names")
    return content
