"""Keys of before a method's settings had a group: they work for one release, and say so.

``gamma`` of a run of ``uefl`` is ``uefl.gamma`` now. Which group an old key belongs to is known by
the run's method, since two methods may have had the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS, settings_class
from fedsilo.models.contract.one_line import shown
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, defaults, key_of, keys_of


@cache
def new_keys(method: str) -> Mapping[str, str]:
    """Return the keys of ``method`` by what they were called; of an unknown method none."""
    keys = keys_of(settings_class(method)) if method in METHODS else {}
    return {key_of(name): key for name, key in keys.items()}


def with_new_keys(values: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """Return settings under their keys of today, and a line for each that came under an old one.

    Raises:
        SettingError: an old and a new key of one setting came with different values.
    """
    common = defaults(CommonSettings)
    method = str(values.get("method", common["method"]))
    renamed: dict[str, Value] = {}
    lines = []
    for key, value in values.items():
        new = key if key in common else new_keys(method).get(key, key)
        if new != key:
            if values.get(new, value) != value:
                raise SettingError(
                    f"settings '{key}' ({shown(value)}) and '{new}' ({shown(values[new])}) are "
                    f"one setting under its old and its new key: remove '{key}'"
                )
            lines.append(f"setting '{key}' is now '{new}'; the old key works for one release")
        renamed[new] = value
    return renamed, lines


def overlaid(*layers: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """Return settings of several sources, a later one over an earlier, under their keys of today.

    Returns:
        The settings, and a line for each that came under an old key.

    Raises:
        SettingError: one source gives an old and a new key of one setting different values.
    """
    methods = [layer["method"] for layer in layers if "method" in layer]
    merged: dict[str, Value] = {}
    lines: list[str] = []
    method: dict[str, Value] = {"method": methods[-1]} if methods else {}
    for layer in layers:
        values, of_layer = with_new_keys({**layer, **method})
        merged |= values
        lines += of_layer
    return merged, lines


def key_of_today(key: str) -> str:
    """Return a setting's key of today, by that or by one that only one method had; else ``key``."""
    known = {new_keys(method)[key] for method in METHODS if key in new_keys(method)}
    return known.pop() if len(known) == 1 and key not in defaults(CommonSettings) else key
