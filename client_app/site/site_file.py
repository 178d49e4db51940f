"""Parse the text of a site file: its lists of names, and its single values."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.files.yaml_text import YamlError, parse_yaml, with_numbers
from fedsilo.core.messages import ARRAYS, CONFIG, METRICS, SURVEYED
from fedsilo.core.methods import OURS
from fedsilo.core.settings_schema import as_mapping, build_from_file
from fedsilo.datasets.registry import DATA_SETS
from fedsilo.strategies.wire.secure_keys import SECURE

_ROOTS = tuple(f"{record}/" for record in (ARRAYS, METRICS, CONFIG, SURVEYED, SECURE))
_NEEDED = ("methods", "datasets", "records")
_LISTS = (*_NEEDED, "refused-records")


def read_rules(text: str, kind: type) -> Any:
    """Parse a site file's YAML ``text`` into an object of the class ``kind``, such as ``SiteFile``.

    The lists 'methods', 'datasets' and 'records' are required, but may be empty. A pattern in
    'records' or 'refused-records' must be "*" or begin with the name of a record, such as
    "arrays/". The result's ``given`` has all values that the text sets, except lists, by key.

    Raises:
        SettingError: the text is empty or not a YAML mapping, or a key is unknown or missing. The
            error also means that a value has the wrong type or range, a pattern is invalid, a
            method or data set is unknown, or 'audit-log' is not an absolute path.
    """
    try:
        content = with_numbers(parse_yaml(text))
    except YamlError as error:
        raise SettingError(str(error)) from None
    if content is None:
        raise SettingError("it is empty")
    if not isinstance(content, dict):
        raise SettingError("it is not a list of 'key: value'")
    rules: Any = build_from_file(kind, content, more=_LISTS)
    lists: dict[str, tuple[str, ...]] = {}
    for key in _LISTS:
        if key in content:
            lists[key] = _texts(key, content[key])
    _refuse_unknown("method", lists.get("methods", ()), OURS)
    _refuse_unknown("data set", lists.get("datasets", ()), DATA_SETS)
    for key in ("records", "refused-records"):
        _refuse_rootless(key, lists.get(key, ()))
    for key in _NEEDED:
        if key not in lists:
            raise SettingError(f"it lacks '{key}': list what is allowed, or [\"*\"] for everything")
    log = content.get("audit-log")
    if log and not Path(log).is_absolute():
        raise SettingError("'audit-log' must be an absolute path")
    values = as_mapping(rules)
    given = {key: values[key] for key in content if key not in lists}
    return replace(
        rules,
        given=given,
        methods=lists["methods"],
        datasets=lists["datasets"],
        records=lists["records"],
        refused_records=lists.get("refused-records", ()),
    )


def _texts(key: str, value: Any) -> tuple[str, ...]:
    """Return the strings in a list of the site file, as a tuple. The list may be empty.

    Args:
        key: the key of the list, for the error.
        value: the value under that key.

    Raises:
        SettingError: the value is not a list, or an entry is not a string or is empty.
    """
    texts: list[str] = []
    if isinstance(value, list):
        texts = [text for text in value if isinstance(text, str) and text]
    # An empty list is one that allows nothing
    if texts != value:
        raise SettingError(f"'{key}' must be a list of texts, such as [\"*\"]")
    return tuple(texts)


def _refuse_unknown(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check that each plain name in a list of the site file is known, to find misspelt names.

    Patterns with ``*`` are not checked. Names with '.', ':' or '_' are not checked either, because
    they may name plugins.

    Args:
        what: the kind of name, for the error: "method" or "data set".
        names: the names and patterns in the list.
        known: the names that exist.
    """
    for name in names:
        # Plugin names contain one of the last three
        if not set(name) & set("*.:_") and name not in known:
            raise unknown_name(what, name, known)


def _refuse_rootless(key: str, patterns: Iterable[str]) -> None:
    """Check that each pattern is "*" or begins with the name of a record, such as "arrays/".

    ``key`` is the key that lists the patterns, for the error.

    Raises:
        SettingError: a pattern has another form. The error names the first invalid pattern.
    """
    for pattern in patterns:
        if pattern != "*" and not pattern.startswith(_ROOTS):
            raise SettingError(
                f"'{key}' has '{pattern}', which must begin with one of {', '.join(_ROOTS)}"
            )
