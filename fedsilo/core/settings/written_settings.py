"""Settings as files have them: groups as mappings, and YAML strings as mappings or lists."""

import json
from collections.abc import Mapping
from typing import Any

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import RENAMED, SETTINGS, with_current_keys
from fedsilo.core.settings_schema import Value, keys_with

_TODAY = frozenset(keys_with(CommonSettings, "structured"))
# Settings whose text is YAML; a removed setting may have been one
_STRUCTURED = (
    _TODAY | {former for former, key in RENAMED.items() if key in _TODAY} | SETTINGS.keys()
)


def flat_values(
    content: Mapping[str, Any], where: str = "", *, quietly: bool = False
) -> dict[str, Value]:
    """Convert the settings of a file to flat settings with keys ``group.key``.

    The file may have settings in groups, which are mappings, and settings that are flat already. If
    a setting takes a YAML string, the file may have a mapping or a list instead, which becomes
    JSON. Former names are replaced by today's keys. Unknown settings stay.

    Args:
        content: the content of a file, or a part of it.
        where: the file that the settings come from, which begins each error; empty for none.
        quietly: whether to leave former names out of the log. A run's record is read quietly,
            because users cannot change it.

    Raises:
        SettingError: a value is not a bool, a number or a string, and is not a mapping or list for
            a setting that takes YAML. An empty group is refused too. The error is also raised if a
            setting is given twice: flat and in its group, or under today's key and a former name.
    """
    flat: dict[str, Value] = {}
    for key, declared in content.items():
        if isinstance(declared, dict) and key not in _STRUCTURED:
            members = {f"{key}.{name}": value for name, value in declared.items()} or {key: {}}
        else:
            members = {key: declared}
        for name, value in members.items():
            if name in flat:
                # 'train.pace' and 'pace' in a group 'train' are one key: a value would be lost
                raise SettingError(
                    f"{where and f'{where}: '}setting '{one_line(name, 100)}' is given twice, in "
                    "its group and by its whole name: remove one"
                )
            flat[name] = _single_value(name, value, where)
    return with_current_keys(flat, where, quietly=quietly)


def _single_value(key: str, value: Any, where: str) -> Value:
    """Convert a setting's value from a file to a value that Flower's run config can hold.

    A bool, a number or a string is returned unchanged. Some settings take a YAML string. Their
    value may also be a mapping or a list, which becomes a JSON string.

    Args:
        key: the setting, with its group.
        value: the value, as parsed.
        where: the file that the value comes from, which begins the error; empty for none.

    Raises:
        SettingError: the value has another type, or is a mapping or list although the setting does
            not take YAML.
    """
    if key in _STRUCTURED and isinstance(value, dict | list):
        return json.dumps(value)
    if not isinstance(value, bool | int | float | str):
        raise SettingError(
            f"{where and f'{where}: '}setting '{one_line(key, 100)}' must be true or false, a "
            f"number or a text, but is {quote_value(value)}"
        )
    return value


def group_settings(values: Mapping[str, Value]) -> dict[str, Any]:
    """Convert flat settings to groups: ``group.key`` becomes ``key`` in a mapping ``group``.

    This is the form of TOML's tables. Settings without a group stay at the top level and come
    first.
    """
    tables: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for key, value in values.items():
        group, dot, rest = key.partition(".")
        if dot:
            tables.setdefault(group, {})[rest] = value
    return tables
