"""Settings as frozen dataclasses: each field states its default, its range and its meaning.

A field ``local_epochs`` is the run-config key ``local-epochs``. A method's own settings have a
group, the name of their file or the ``group`` of the class: ``gamma`` is ``uefl.gamma``. Values
come as Flower's run config gives them (bool, int, float, str); it knows no lists, and so we do not.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import listed, one_line, shown

Value = bool | int | float | str
S = TypeVar("S")

_LARGEST = 2**63 - 1  # what Flower's run config can hold
_LONGEST, _QUOTED = 4096, 100  # characters of a text, and of one that an error quotes
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Rule:
    """What a field allows: ``minimum`` and ``maximum`` inclusive, ``above`` and ``below`` not.

    A text may be one of ``choices``, or match ``pattern`` as told by ``wording``.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    wording: str = ""

    def allowed(self) -> str:
        """Say the range in words, empty if anything of the type will do."""
        if self.pattern:
            return self.wording
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = [
            ("at least {:g}", self.minimum),
            ("above {:g}", self.above),
            ("at most {:g}", self.maximum),
            ("below {:g}", self.below),
        ]
        return " and ".join(text.format(bound) for text, bound in bounds if bound is not None)

    def holds(self, value: Value) -> bool:
        """Tell whether ``value``, already of the right type, is in range."""
        if isinstance(value, str):
            listed = not self.choices or value in self.choices
            return listed and (not self.pattern or bool(re.fullmatch(self.pattern, value)))
        # Asked of None and not of truth: 0 is a bound too
        return not (
            (self.minimum is not None and value < self.minimum)
            or (self.maximum is not None and value > self.maximum)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


def setting(
    default: Value, help: str, *, roles: str | tuple[str, ...] = "training", **bounds: Any
) -> Any:
    """Declare a dataclass field with a default, a one-line help and a range (see ``Rule``).

    ``roles`` say what it is a setting of, in the words of its class; ``keys_with`` asks for them.
    """
    named = (roles,) if isinstance(roles, str) else roles
    return dataclasses.field(
        default=default, metadata={"rule": Rule(help, **bounds), "roles": named}
    )


def key_of(field_name: str) -> str:
    """Return the run-config key of a common field, or a key within its group: kebab-case."""
    return field_name.replace("_", "-")


def keys_of(cls: type) -> Mapping[str, str]:
    """Return the run-config key of each field, by its name, in declaration order.

    A field belongs to the ``group`` of the class that declares it, also where another inherits it.
    """
    return _keys_of(cls)


@cache
def _keys_of(cls: type) -> Mapping[str, str]:
    keys = {}
    for field in dataclasses.fields(cls):
        owner = next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c))
        group, key = _group_of(owner), key_of(field.name)
        keys[field.name] = f"{group}.{key.removeprefix(f'{group}-')}" if group else key
    return keys


def keys_with(cls: type, *roles: str) -> tuple[str, ...]:
    """Return the keys of the fields that have any of ``roles``, in declaration order.

    Raises:
        ValueError: no field has one of the roles: it is misspelt.
    """
    keys = keys_of(cls)
    roles_by_key = {keys[f.name]: f.metadata.get("roles", ()) for f in dataclasses.fields(cls)}
    if unknown := set(roles).difference(*roles_by_key.values()):
        raise ValueError(f"no field of {cls.__name__} has the role '{min(unknown)}'")
    return tuple(key for key, named in roles_by_key.items() if not set(roles).isdisjoint(named))


def _group_of(cls: type) -> str:
    """Return the group that a class names, else that of the method whose file it stands in."""
    room, _, name = cls.__module__.rpartition(".")
    return str(vars(cls).get("group", key_of(name) if room == "fedsilo.models.methods" else ""))


def defaults(cls: type) -> dict[str, Value]:
    """Return every key of ``cls`` with its default."""
    values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
    return {key: values[name] for name, key in keys_of(cls).items()}


def as_mapping(settings: Any) -> dict[str, Value]:
    """Return a settings object as keys and values, in declaration order."""
    return {key: getattr(settings, name) for name, key in keys_of(type(settings)).items()}


def without_groups(settings: Any) -> dict[str, Value]:
    """Return a settings object as values by the part of their keys within the group."""
    return {key_of(name): getattr(settings, name) for name in keys_of(type(settings))}


def rule_of(cls: type, key: str) -> Rule:
    """Return the rule of ``key`` in ``cls``."""
    names = {key: name for name, key in keys_of(cls).items()}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    rule: Rule = fields[names[key]].metadata["rule"]
    return rule


def unknown_key(key: str, known: Iterable[str]) -> SettingError:
    """Build the error for a key that nobody knows, with the nearest valid name."""
    names, key = sorted(known), _quotable(key)
    near = difflib.get_close_matches(key.replace("_", "-"), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else f"; known keys: {listed(names)}"
    group, dot, _ = key.partition(".")
    groups = sorted({name.partition(".")[0] for name in names if "." in name})
    if dot and group not in groups:
        what = f"setting '{key}': no method has a group '{group}' (groups: {', '.join(groups)})"
        return SettingError(what + (hint if near else ""))
    return SettingError(f"unknown setting '{key}'{hint}")


def unknown_name(what: str, name: str, known: Iterable[str]) -> SettingError:
    """Build the error for an unknown method, data set or experiment."""
    names, name = sorted(map(str, known)), _quotable(name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return SettingError(f"unknown {what} '{name}': known are {listed(names)}{hint}")


def _quotable(name: object) -> str:
    """Return a name that nobody knows as an error may hold it."""
    return one_line(name, _QUOTED)


def build(cls: type[S], values: Mapping[str, Value]) -> S:
    """Build ``cls`` from the keys of ``values`` that it declares; other keys are not looked at.

    Raises:
        SettingError: a value has the wrong type or lies outside its range.
    """
    plain: type = cls  # mypy holds type[S] for nothing that a cache can take
    hints, keys = _types(plain), keys_of(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # S
    chosen = {
        name: _checked(key, values[key], hints[name], fields[name].metadata["rule"])
        for name, key in keys.items()
        if key in values
    }
    return cls(**chosen)


@cache
def _types(cls: type) -> Mapping[str, type]:
    """Return the types of a class's fields; reading them takes 2 ms, and each message asks."""
    return get_type_hints(cls)


def _checked(key: str, value: Value, kind: type, rule: Rule) -> Value:
    allowed = rule.allowed()
    wanted = _TYPE_NAMES[kind] + (f", {allowed}" if allowed else "")
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise SettingError(
            f"setting '{key}' is {shown(value)} ({type(value).__name__}); it must be {wanted}"
        )
    if isinstance(value, str) and (wrong := _text_fault(value)):
        raise SettingError(f"setting '{key}' is {shown(value)}: {wrong}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise SettingError(f"setting '{key}' is {shown(value)}; it must be {wanted}")
    typed: Value = float(value) if kind is float else value
    if isinstance(typed, float) and not math.isfinite(typed):
        raise SettingError(f"setting '{key}' is {shown(value)}; it must be {wanted}")
    if not rule.holds(typed):
        raise SettingError(f"setting '{key}' is {shown(value)}; it must be {wanted}")
    return typed


def _text_fault(text: str) -> str:
    """Say why no setting can be such a text; empty: one can."""
    if len(text) > _LONGEST or not text.isprintable():
        return f"it must be at most {_LONGEST} characters, all of which can be printed"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return "there is no such user's home folder here"
    return ""
