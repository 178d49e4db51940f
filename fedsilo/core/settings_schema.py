"""Settings as frozen dataclasses, whose values pydantic checks.

A class of settings has a ``group``, and its field ``batch_size`` is the run-config key
``train.batch-size``. A method's group is the name of its file, unless its class sets ``group``. If
a class has no group, its keys have no prefix. Values have the types of Flower's run config (bool,
int, float, str), so a value cannot be a list.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedsilo.core.errors import SettingError, unknown_key
from fedsilo.core.one_line import quote_value

Value = bool | int | float | str
S = TypeVar("S")

_LARGEST = 2**63 - 1  # the largest whole number that Flower's run config can hold
_LONGEST = 4096  # the most characters that a value may have
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
# pydantic's bounds of a number, in the order errors list them
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
# pydantic's names for a value of another type; every other fault is outside the allowed range
_OTHER_TYPES = {"bool_type", "int_type", "float_type", "string_type"}


@dataclass(frozen=True)
class SettingRule:
    """The rule of one setting, for lists of settings and for errors.

    Attributes:
        help: one line that describes the setting.
        kind: bool, int, float or str.
        roles: further lists that contain the setting, see ``common_settings``.
        allowed: the allowed values in words; empty if every value of the kind is allowed.
        choices: the strings that the field's ``Literal`` allows; empty without a ``Literal``.
        minimum, maximum: the bounds of a number. ``allowed`` tells whether the bounds themselves
            are allowed.
        is_internal: whether only fedsilo sets the setting, never a user.
    """

    help: str
    kind: type
    roles: tuple[str, ...] = ()
    allowed: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf
    is_internal: bool = False


def setting(
    default: Value,
    help: str,
    *,
    roles: str | tuple[str, ...] = (),
    wording: str = "",
    is_internal: bool = False,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    pattern: str | None = None,
) -> Any:
    """Declare a dataclass field as a setting, with its default, help text and allowed values.

    The type of the field may be a ``Literal`` of the allowed strings. The function ``build`` later
    checks a run's values against this declaration. The default itself is not checked. A float may
    not be infinite or NaN.

    Args:
        default: the default. A value must be of the default's type, but an int may stand for a
            float.
        help: one line that describes the setting.
        roles: one label or several, such as "own". ``keys_with`` lists all settings that have a
            label.
        wording: describes the allowed strings in errors, if no ``Literal`` lists them.
        is_internal: whether only fedsilo sets the setting, never a user. Lists of settings leave
            out internal ones.
        gt: the number must be greater than this.
        ge: the number must be at least this.
        lt: the number must be less than this.
        le: the number must be at most this.
        pattern: a regular expression that the whole string must match.

    Returns:
        The result of ``dataclasses.field``, whose metadata hold the declaration.
    """
    named = (roles,) if isinstance(roles, str) else roles
    said = {"roles": named, "wording": wording, "is_internal": is_internal}
    # pydantic reads its own names in a field's metadata, so the class stays a plain dataclass
    checked: dict[str, Any] = {"description": help}
    if not isinstance(default, str):
        # True is not a number here, and 3.0 is not a whole number
        checked["strict"] = True
    for name, bound in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le)):
        if bound is not None:
            checked[name] = bound
    if pattern is not None:
        # Without the anchors, pydantic would accept a match anywhere in the text
        checked["pattern"] = f"^(?:{pattern})$"
    if isinstance(default, float):
        checked["allow_inf_nan"] = False
    return dataclasses.field(default=default, metadata={**said, **checked})


def key_of(field_name: str) -> str:
    """Return a field's name as users write it, with ``-`` in place of ``_``."""
    return field_name.replace("_", "-")


# Types of a class's fields. Reading them takes 2 ms, and each message builds settings
@cache
def _types_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def adapter_of(cls: type) -> TypeAdapter[Any]:
    """Build pydantic's validator of a class, once per process, because that takes milliseconds."""
    return TypeAdapter(cls)


def _owner_of(cls: type, field_name: str) -> type:
    """Return the class that declares a field: the settings class itself or one of its bases.

    If several declare it, the first in the method resolution order is returned.
    """
    return next(c for c in cls.__mro__ if field_name in inspect.get_annotations(c))


def _group_of(cls: type) -> str:
    """Return the group of a settings class, which is the first part of its keys, such as "train".

    The class's attribute ``group`` is the group. An inherited attribute does not count. If a class
    in ``fedsilo/models/methods`` has no such attribute, the group is the name of its file, with '-'
    in place of '_'. For any other class without the attribute, the result is empty, and the keys
    have no group.
    """
    if "group" in vars(cls):
        return str(vars(cls)["group"])
    folder, _, name = cls.__module__.rpartition(".")
    if folder == "fedsilo.models.methods":
        return key_of(name)
    return ""


def _key_in_group(group: str, field_name: str) -> str:
    """Build the key by which users write a setting, such as ``train.batch-size``.

    The key is ``<group>.<name of the field>``, with '-' in place of '_'. If ``group`` is empty, the
    key is only the name. If the name begins with the group and a '-', this beginning is left out:
    the field ``run_name`` in the group ``run`` has the key ``run.name``. If the name equals the
    group, the key is ``<group>.name``.
    """
    key = key_of(field_name)
    if not group:
        return key
    # 'network' in the group 'network' is its name; 'run_name' in the group 'run' is 'run.name'
    if key == group:
        return f"{group}.name"
    return f"{group}.{key.removeprefix(f'{group}-')}"


@cache
def _names_by_key(cls: type) -> Mapping[str, str]:
    """Map the key of each setting of a settings class to the name of the setting's field.

    The settings are in the order of their declaration. The key of an inherited setting has the
    group of the class that declares the setting. The result is computed once per class.
    """
    names = {}
    for field in dataclasses.fields(cls):
        group = _group_of(_owner_of(cls, field.name))
        names[_key_in_group(group, field.name)] = field.name
    return names


def keys_of(cls: type) -> dict[str, str]:
    """Return name of the field -> run-config key, in declaration order."""
    return {name: key for key, name in _names_by_key(cls).items()}


@cache
def groups_of(cls: type) -> dict[str, type]:
    """Map each group of a settings class to the class that declares the settings in the group.

    That class is ``cls`` or one of its bases. If several classes declare settings of the same
    group, the class of the first setting counts. Settings without a group are under the key "".
    """
    found: dict[str, type] = {}
    for field in dataclasses.fields(cls):
        owner = _owner_of(cls, field.name)
        found.setdefault(_group_of(owner), owner)
    return found


@cache
def _read_rules(cls: type) -> Mapping[str, SettingRule]:
    """Map the key of each setting of a class to the setting's rule, in the order of declaration.

    A rule has the help text, the type and the allowed values of a setting. Fields that were not
    declared by ``setting`` are left out. The result is computed once per class.
    """
    rules = {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, name in _names_by_key(cls).items():
        if "description" in fields[name].metadata:
            rules[key] = _build_rule(fields[name], _types_of(cls)[name])
    return rules


def _build_rule(field: dataclasses.Field[Any], hint: Any) -> SettingRule:
    """Build a setting's rule from its dataclass field, to describe the allowed values.

    The rule's ``allowed`` describes the allowed values in words, for errors. It starts with the
    choices, if there are any. Next comes the field's ``wording``, a description that its author
    wrote. A field without ``wording`` has its pattern there, if there is one. If all three are
    missing, ``allowed`` has the bounds, such as "above 0 and at most 1". ``minimum`` and
    ``maximum`` are the bounds as numbers. A missing bound is infinite.

    Args:
        field: the field, as ``setting`` made it.
        hint: the type of the field.
    """
    said = field.metadata
    choices = _choices_of(hint)
    words = []
    if choices:
        words.append(f"one of {', '.join(choices)}")
    if said["wording"]:
        words.append(said["wording"])
    elif "pattern" in said:
        words.append(f"a text of the form {said['pattern']}")
    bounds = []
    for name, word in _BOUNDS.items():
        if name in said:
            bounds.append(f"{word} {said[name]:g}")
    return SettingRule(
        help=said["description"],
        kind=type(field.default),
        roles=said["roles"],
        # A text has words and no bounds, a number mostly bounds and no words
        allowed=", ".join(words) or " and ".join(bounds),
        choices=choices,
        minimum=said.get("ge", said.get("gt", -math.inf)),
        maximum=said.get("le", said.get("lt", math.inf)),
        is_internal=said["is_internal"],
    )


def _choices_of(hint: Any) -> tuple[str, ...]:
    """Return the strings that the type of a setting allows; empty if they are not limited.

    The strings come from a ``Literal``, which is the type itself or a direct argument of the type,
    as in ``Literal["a"] | None``. Of several arguments, the first ``Literal`` counts.

    Args:
        hint: the type of a field.
    """
    if get_origin(hint) is Literal:
        return get_args(hint)
    for part in get_args(hint):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()


def rule_of(cls: type, key: str) -> SettingRule:
    """Return the rule of the setting ``key``, a run-config key. Raises KeyError if unknown."""
    return _read_rules(cls)[key]


def rules_of(cls: type) -> Mapping[str, SettingRule]:
    """Return key -> rule of every setting of ``cls``, in declaration order."""
    return _read_rules(cls)


def keys_in(cls: type, *groups: str) -> tuple[str, ...]:
    """List the keys of all settings of a class in the given groups, in the order of declaration.

    A group is the first part of a key, such as "train".

    Raises:
        ValueError: ``cls`` lacks at least one of the groups.
    """
    unknown = set(groups) - groups_of(cls).keys()
    if unknown:
        raise ValueError(f"{cls.__name__} has no group '{min(unknown)}'")
    found = []
    for name, key in keys_of(cls).items():
        if _group_of(_owner_of(cls, name)) in groups:
            found.append(key)
    return tuple(found)


def keys_with(cls: type, *roles: str) -> tuple[str, ...]:
    """List the keys of all settings of a class that have any of the given roles.

    A role is a label that ``setting`` gives to some settings, such as "own" for those that a site
    may override. The keys are in the order of declaration.

    Raises:
        ValueError: at least one of the roles belongs to no setting of ``cls``.
    """
    unknown = set(roles)
    found = []
    for key, rule in _read_rules(cls).items():
        unknown.difference_update(rule.roles)
        if not set(roles).isdisjoint(rule.roles):
            found.append(key)
    if unknown:
        raise ValueError(f"no field of {cls.__name__} has the role '{min(unknown)}'")
    return tuple(found)


def defaults(cls: type) -> dict[str, Value]:
    """Return key -> default of every setting of ``cls``, in declaration order."""
    return {key: getattr(cls, name) for key, name in _names_by_key(cls).items()}


def as_mapping(settings: Any) -> dict[str, Value]:
    """Return key -> value of a settings object, in declaration order."""
    cls: type = type(settings)
    return {key: getattr(settings, name) for key, name in _names_by_key(cls).items()}


def without_groups(settings: Any) -> dict[str, Value]:
    """Return name -> value of a settings object, where a name has no group: ``batch-size``."""
    cls: type = type(settings)
    return {key_of(name): getattr(settings, name) for name in _names_by_key(cls).values()}


def values_of(cls: type, values: Mapping[str, Value]) -> dict[str, Value]:
    """Select the settings of one class from a run config, which has the settings of all classes.

    The result maps keys to values, in the order of declaration. A setting that the run config lacks
    is left out. The values are not checked.
    """
    return {key: values[key] for key in _read_rules(cls) if key in values}


def build(cls: type[S], values: Mapping[str, Value]) -> S:
    """Build a settings object from values by key, and check the values.

    A setting without a value gets its default.

    Args:
        cls: the settings class.
        values: key of a setting -> value. All keys must belong to ``cls``, so callers select them
            from a run config by ``values_of``.

    Raises:
        SettingError: a key is unknown, a value has the wrong type or is not allowed, or the class's
            ``__post_init__`` refuses the combination of values. If several values are wrong, the
            error names one.
    """
    # mypy does not accept type[S] as the key of a cache
    plain: type = cls
    names, rules = _names_by_key(plain), _read_rules(plain)
    chosen = {}
    for key, value in values.items():
        if key not in rules:
            raise unknown_key(key, rules)
        chosen[names[key]] = _prepare_value(key, value, rules[key])
    try:
        built: S = adapter_of(plain).validate_python(chosen)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        if not fault["loc"]:
            # The __post_init__ of a plugin's class compares several settings, so none is named
            group = _group_of(plain) or plain.__name__
            reason = str(fault["msg"]).removeprefix("Value error, ")
            raise SettingError(f"the settings of '{group}' are refused: {reason}") from None
        key = keys_of(plain)[str(fault["loc"][0])]
        raise _wrong_value(key, values[key], rules[key], str(fault["type"])) from None
    return built


def build_from_file(
    cls: type[S], content: Mapping[Any, Any], *, place: str = "", more: Iterable[str] = ()
) -> S:
    """Build a settings object from a mapping in a file, and refuse unknown keys.

    A setting that the mapping lacks gets its default.

    Args:
        cls: the settings class.
        content: the mapping.
        place: prefix of the keys in errors, such as the group and a dot; empty for none.
        more: further keys that the mapping may have. Their values are ignored.

    Raises:
        SettingError: a key is unknown, a value has the wrong type or is not allowed, or the class's
            ``__post_init__`` refuses the combination of values. Lists and mappings are wrong types.
    """
    plain: type = cls
    rules = _read_rules(plain)
    known = [f"{place}{key}" for key in (*rules, *more)]
    for key, value in content.items():
        if f"{place}{key}" not in known:
            raise unknown_key(f"{place}{key}", known)
        if key in rules and isinstance(value, list | dict | set | tuple | bytes):
            raise SettingError(f"setting '{key}' must be a single value, not a list or a mapping")
    return build(cls, values_of(plain, content))


def _prepare_value(key: str, value: Value, rule: SettingRule) -> Value:
    """Check a setting's value for faults that pydantic does not notice, and return the value.

    The returned value is the given one, with one exception. A bool becomes the string 'true' or
    'false' if this string is one of the setting's choices. Ranges and patterns are not checked
    here.

    Args:
        key: the setting, for the error.
        value: the value.
        rule: the setting's rule, which has the type and the choices.

    Raises:
        SettingError: a whole number does not fit into 64 bits, or a string setting has another
            value than a string. A string is refused if it has more than 4096 characters, is not
            printable, or names an unknown user after '~'.
    """
    if rule.kind is str and isinstance(value, bool) and str(value).lower() in rule.choices:
        # TOML and YAML read a bare 'deterministic=true' as a bool
        return str(value).lower()
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise _wrong_value(key, value, rule, "too_large")
    if rule.kind is str:
        if not isinstance(value, str):
            # Not left to pydantic, which would decode bytes
            raise _wrong_value(key, value, rule, "string_type")
        fault = _text_fault(value)
        if fault:
            raise SettingError(f"'{key}' {fault}, but is {quote_value(value)}")
    return value


def _wrong_value(key: str, value: Value, rule: SettingRule, fault: str) -> SettingError:
    """Build the error for a value that is not allowed. The caller raises it.

    The message names the key, the allowed values and the given value, with its type if this is
    wrong. For a key with a dot it also names the command that describes the setting.

    Args:
        key: the setting.
        value: the value that was given.
        rule: the setting's rule, which describes the allowed values.
        fault: pydantic's name for the fault, such as 'greater_than', or 'too_large' for a whole
            number beyond 64 bits. It decides how the message describes the allowed values.
    """
    # A number's range needs no type: 'must be above 0'. A text's range describes the allowed texts
    has_kind = type(value) is rule.kind or (rule.kind is float and type(value) is int)
    wanted = rule.allowed
    if fault == "too_large":
        wanted = f"at most {_LARGEST}"
    elif fault == "finite_number":
        # Infinity is above every lower bound, so the bounds would not say what is wrong
        wanted = ", ".join(filter(None, ["a finite number", rule.allowed]))
    elif not wanted:
        wanted = _TYPE_NAMES[rule.kind]
    elif fault in _OTHER_TYPES or not has_kind:
        wanted = f"{_TYPE_NAMES[rule.kind]}, {rule.allowed}"
    given = quote_value(value)
    if not has_kind:
        given = f"{given} ({type(value).__name__})"
    sentence = f"'{key}' must be {wanted}, but is {given}"
    if "." in key:
        # A key of a site file is without a group, and is not in the list of settings
        sentence += f"; 'fedsilo settings {key}' describes it"
    return SettingError(sentence)


def _text_fault(text: str) -> str | None:
    """Return a description of the fault of a setting's string, or None if it has no fault.

    The description follows the setting's name, as in "must have ...". The string must be printable
    and have at most 4096 characters. A string such as '~ann/data' names a user after its first
    character '~'. This user must exist on this machine.
    """
    if len(text) > _LONGEST or not text.isprintable():
        return f"must have at most {_LONGEST} characters, all of which can be printed"
    # Python leaves '~name' unchanged if the user does not exist, and would make a folder '~name'
    if text.startswith("~") and os.path.expanduser(text) == text:
        return "must name a user whose home folder is on this machine"
    return None
