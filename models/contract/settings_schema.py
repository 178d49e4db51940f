"""Settings as frozen dataclasses: each field states its default, its range and its meaning.

A field ``local_epochs`` is the run-config key ``local-epochs``. A method's own settings have a
group, the name of their file or the ``group`` of the class: ``gamma`` is ``uefl.gamma``. Values
come as Flower's run config gives them (bool, int, float, str); it knows no lists, and so we do not.
"""

import dataclasses
import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import join_names, one_line, quote_value

Value = bool | int | float | str
S = TypeVar("S")

_LARGEST = 2**63 - 1  # the largest whole number that Flower's run config can hold
_LONGEST, _QUOTED = 4096, 100  # characters of a value, and of a value in an error
_LISTED = 30  # the most names in an error
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class SettingRule:
    """The meaning and the allowed values of a setting.

    Attributes:
        help: one line that describes the setting.
        roles: the groups of settings that it belongs to, see ``models.contract.settings``.
        minimum, maximum: bounds of a number, inclusive.
        above, below: bounds of a number, exclusive.
        choices: the allowed texts; empty if ``pattern`` or nothing restricts a text.
        pattern: a regular expression that the whole text must match; empty for none.
        wording: describes the texts that ``pattern`` or ``more`` allows.
        more: tells whether a text that is not among ``choices`` is allowed too.
    """

    help: str
    roles: tuple[str, ...]
    minimum: float = -math.inf
    maximum: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: str = ""
    wording: str = ""
    more: Callable[[str], bool] | None = None

    def describe_range(self) -> str:
        """Describe the allowed values; empty if every value of the type is allowed."""
        if self.pattern:
            return self.wording
        if self.choices:
            return ", ".join(["one of " + ", ".join(self.choices), *filter(None, [self.wording])])
        low = {"at least": self.minimum, "above": self.above}
        bounds = low | {"at most": self.maximum, "below": self.below}
        return " and ".join(f"{word} {at:g}" for word, at in bounds.items() if math.isfinite(at))

    def allows(self, value: Value) -> bool:
        """Tell whether a value, which has the right type, is allowed."""
        if isinstance(value, str):
            matches = not self.pattern or bool(re.fullmatch(self.pattern, value))
            if self.more and value not in self.choices:
                return self.more(value)
            return matches and (not self.choices or value in self.choices)
        finite = math.isfinite(value) if isinstance(value, float) else abs(value) <= _LARGEST
        inside = self.minimum <= value <= self.maximum and self.above < value < self.below
        return finite and inside


def setting(
    default: Value, help: str, *, roles: str | tuple[str, ...] = "training", **bounds: Any
) -> Any:
    """Declare a dataclass field with its default and its rule.

    Args:
        default: the default, which also decides the type.
        help: one line that describes the setting.
        roles: the groups of settings that it belongs to; ``keys_with`` selects by them.
        bounds: further attributes of the ``SettingRule``.
    """
    named = (roles,) if isinstance(roles, str) else roles
    return dataclasses.field(default=default, metadata={"rule": SettingRule(help, named, **bounds)})


def choice(*choices: str, help: str, roles: str | tuple[str, ...] = "training", **more: Any) -> Any:
    """Declare a field that takes one of ``choices``; the first choice is the default."""
    return setting(choices[0], help, roles=roles, choices=choices, **more)


def key_of(field_name: str) -> str:
    """Return the run-config key of a field, without its group: ``_`` becomes ``-``."""
    return field_name.replace("_", "-")


# Types of a class's fields. Reading them takes 2 ms, and each message builds settings
_types = cache(get_type_hints)


@cache
def _names_by_key(cls: type) -> Mapping[str, str]:
    """Return key -> name of the field, in declaration order.

    A field belongs to the ``group`` of the class that declares it, even if a subclass inherits it.
    """
    names = {}
    for field in dataclasses.fields(cls):
        # The first class in the order of lookup that declares the field: the nearest one
        owner = next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c))
        group, key = _group_of(owner), key_of(field.name)
        names[f"{group}.{key.removeprefix(f'{group}-')}" if group else key] = field.name
    return names


def _group_of(cls: type) -> str:
    """Return a class's group: its ``group``, or the method whose file declares it, or empty."""
    folder, _, name = cls.__module__.rpartition(".")
    return str(vars(cls).get("group", key_of(name) if folder == "fedsilo.models.methods" else ""))


def keys_of(cls: type) -> dict[str, str]:
    """Return name of the field -> run-config key, in declaration order."""
    return {name: key for key, name in _names_by_key(cls).items()}


@cache
def _rules(cls: type) -> Mapping[str, SettingRule]:
    rules = {f.name: f.metadata["rule"] for f in dataclasses.fields(cls) if "rule" in f.metadata}
    return {key: rules[name] for key, name in _names_by_key(cls).items() if name in rules}


def rule_of(cls: type, key: str) -> SettingRule:
    """Return the rule of the setting ``key``, a run-config key of ``cls``."""
    return _rules(cls)[key]


def keys_with(cls: type, *roles: str) -> tuple[str, ...]:
    """Return the keys of the fields that have any of ``roles``, in declaration order.

    Raises:
        ValueError: no field has one of the roles, which is misspelt then.
    """
    rules = _rules(cls)
    if unknown := set(roles).difference(*(rule.roles for rule in rules.values())):
        raise ValueError(f"no field of {cls.__name__} has the role '{min(unknown)}'")
    return tuple(key for key, rule in rules.items() if not set(roles).isdisjoint(rule.roles))


def defaults(cls: type) -> dict[str, Value]:
    """Return key -> default of every setting of ``cls``, in declaration order."""
    return {key: getattr(cls, name) for key, name in _names_by_key(cls).items()}


def as_mapping(settings: Any) -> dict[str, Value]:
    """Return key -> value of a settings object, in declaration order."""
    cls: type = type(settings)
    return {key: getattr(settings, name) for key, name in _names_by_key(cls).items()}


def without_groups(settings: Any) -> dict[str, Value]:
    """Return key without its group -> value of a settings object."""
    cls: type = type(settings)
    return {key_of(name): getattr(settings, name) for name in _names_by_key(cls).values()}


def unknown_key(key: str, known: Iterable[str]) -> SettingError:
    """Build the error for an unknown key, with the nearest valid one."""
    names, key = sorted(known), one_line(key, _QUOTED)
    # A method's setting without its group is the commonest mistake: 'gamma' for 'uefl.gamma'
    near = [name for name in names if name.endswith(f".{key}")]
    near = near or difflib.get_close_matches(key.replace("_", "-"), names, n=1, cutoff=0.5)
    guess = " or ".join(f"'{name}'" for name in near)
    hint = f"; did you mean {guess}?" if near else f"; known keys: {join_names(names)}"
    group = key.partition(".")[0]
    groups = sorted({name.partition(".")[0] for name in names if "." in name})
    if group != key and group not in groups:
        what = f"setting '{key}': no method has a group '{group}' (groups: {', '.join(groups)})"
        return SettingError(what + (hint if near else ""))
    return SettingError(f"unknown setting '{key}'{hint}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> SettingError:
    """Build the error for an unknown name of ``what``, such as 'method', with the nearest name."""
    names, name = sorted(map(str, known)), one_line(name, _QUOTED)
    # This cutoff is low enough that 'acc' finds 'accuracy'; difflib's default of 0.6 does not
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.54):
        hint = f"; did you mean '{near[0]}'?"
    elif len(names) > _LISTED and what in ("experiment", "method"):
        hint = f": 'fedsilo {what}s' lists all {len(names)}"
    else:
        hint = f": known are {join_names(names)}"
    return SettingError(f"unknown {what} '{name}'{hint}")


def build(cls: type[S], values: Mapping[str, Value]) -> S:
    """Build a ``cls`` from the keys of ``values`` that it declares; other keys are ignored.

    Raises:
        SettingError: a value has the wrong type or is not allowed.
    """
    # mypy does not accept type[S] as the key of a cache
    plain: type = cls
    kinds, rules = _types(plain), _rules(plain)
    chosen = {
        name: _check_value(key, values[key], kinds[name], rules[key])
        for key, name in _names_by_key(plain).items()
        if key in values and key in rules
    }
    return cls(**chosen)


def build_from_file(
    cls: type[S], content: Mapping[Any, Any], *, place: str = "", more: Iterable[str] = ()
) -> S:
    """Build a ``cls`` from a mapping in a file; unknown keys are refused.

    Args:
        cls: the class of settings.
        content: the mapping.
        place: prefix of the keys in errors, such as the group; empty for none.
        more: keys that the mapping may have besides, and that are not settings of ``cls``.

    Raises:
        SettingError: a key is unknown, or a value has the wrong type or is not allowed.
    """
    plain: type = cls
    rules = _rules(plain)
    known = [f"{place}{key}" for key in (*rules, *more)]
    for key, value in content.items():
        if f"{place}{key}" not in known:
            raise unknown_key(f"{place}{key}", known)
        if key in rules and isinstance(value, list | dict | set | tuple | bytes):
            raise SettingError(f"setting '{key}' must be one value, no list and no mapping")
    return build(cls, content)


def _check_value(key: str, value: Value, kind: type, rule: SettingRule) -> Value:
    """Return ``value`` as ``kind``, or raise a ``SettingError`` if the rule does not allow it."""
    # TOML writes 1.0 as 1, so that a whole number is a number too. bool is an int in Python, hence
    # the comparison of types instead of isinstance
    number = kind is float and type(value) is int and abs(value) <= _LARGEST
    typed = float(value) if number else value
    if kind is str and isinstance(value, bool) and str(value).lower() in rule.choices:
        # TOML and YAML read a bare 'deterministic=true' as a bool
        typed = str(value).lower()
    if type(typed) is kind and rule.allows(typed):
        fault = _text_fault(typed) if isinstance(typed, str) else None
        if fault is None:
            return typed
        raise SettingError(f"setting '{key}' is {quote_value(value)}: {fault}")
    allowed = rule.describe_range()
    wanted = _TYPE_NAMES[kind] + (f", {allowed}" if allowed else "")
    given = (
        quote_value(value)
        if type(typed) is kind
        else f"{quote_value(value)} ({type(value).__name__})"
    )
    raise SettingError(f"setting '{key}' is {given}; it must be {wanted}")


def _text_fault(text: str) -> str | None:
    """Say why a text cannot be the value of any setting; None if it can."""
    if len(text) > _LONGEST or not text.isprintable():
        return f"it must be at most {_LONGEST} characters, all of which can be printed"
    # Python leaves '~name' unchanged if there is no such user, and would make a folder of that name
    if text.startswith("~") and os.path.expanduser(text) == text:
        return "there is no such user's home folder here"
    return None
