"""Settings by short names in tests: fields of the classes, or keys with ``__`` for the dot."""

from collections.abc import Mapping
from typing import TypeVar

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import RENAMED
from fedsilo.core.settings_schema import key_of, keys_of

V = TypeVar("V")

_FIELDS = keys_of(CommonSettings)


def as_key(name: str) -> str:
    """Return the key for ``batch_size`` (a field), ``uefl__gamma`` or a key itself."""
    if name in _FIELDS:
        return _FIELDS[name]
    key = key_of(name.replace("__", "."))
    return RENAMED.get(key, key)


def as_keys(values: Mapping[str, V]) -> dict[str, V]:
    """Return values by the keys of their names; of two names for one key the later counts."""
    return {as_key(name): value for name, value in values.items()}
