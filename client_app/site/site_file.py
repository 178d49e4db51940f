"""The site file's form: which keys there are, and what each may hold. Imported when one is read."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from fedsilo.datasets.io.declarations import (
    Declared,
    Fault,
    YamlError,
    checked,
    fault,
    parse_yaml,
    settings_model,
)
from fedsilo.datasets.registry import DATA_SETS
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, CONFIG, METRICS, SURVEYED
from fedsilo.models.contract.settings_schema import unknown_key, unknown_name

_ROOTS = (f"{ARRAYS}/", f"{METRICS}/", f"{CONFIG}/", f"{SURVEYED}/")


def read_limits(text: str, limits: type) -> Declared:
    """Return what a site file's ``text`` says: its lists, and the settings of ``limits``.

    Raises:
        SettingError: it is no YAML, a key is unknown or missing, or a value cannot be.
    """
    try:
        content = parse_yaml(text)
    except YamlError as error:
        raise SettingError(str(error)) from None
    if not isinstance(content, dict):
        raise SettingError("it is empty" if content is None else "it is no list of 'key: value'")
    declared = checked(_model(limits), content, _refusal)
    log = declared.given().get("audit_log", "")
    if log and not Path(log).is_absolute():
        raise SettingError("'audit-log' must be an absolute path")
    return declared


@cache
def _model(limits: type) -> type[Declared]:
    return settings_model(
        limits,
        methods=(Annotated[Any, _texts("methods"), AfterValidator(_known_methods)], ...),
        datasets=(Annotated[Any, _texts("datasets"), AfterValidator(_known_data_sets)], ...),
        records=(_records("records"), ...),
        refused_records=(_records("refused-records"), ()),
    )


def _refusal(refused: Fault) -> SettingError:
    if refused.kind == "unknown":
        return unknown_key(refused.key, refused.keys)
    if refused.kind == "missing":
        return SettingError(
            f"it lacks '{refused.key}': list what is allowed, or [\"*\"] for everything"
        )
    return SettingError(refused.sentence)


def _texts(key: str) -> BeforeValidator:
    """Return the check of a list of texts, which becomes a tuple."""

    def listed(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            raise fault(f"'{key}' must be a list of texts, such as [\"*\"]")
        return tuple(value)

    return BeforeValidator(listed)


def _known_methods(names: tuple[str, ...]) -> tuple[str, ...]:
    from fedsilo.models.contract.methods import METHODS

    return _known("method", names, METHODS)


def _known_data_sets(names: tuple[str, ...]) -> tuple[str, ...]:
    return _known("data set", names, DATA_SETS)


def _known(what: str, names: tuple[str, ...], known: dict[str, str]) -> tuple[str, ...]:
    """Refuse names that nothing has: a misspelt one would refuse, or let pass, unnoticed."""
    for name in names:
        if "*" not in name and name not in known:
            raise fault(str(unknown_name(what, name, known)))
    return names


def _records(key: str) -> Any:
    """Return the type of a list of patterns of what leaves."""

    def rooted(patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if pattern != "*" and not pattern.startswith(_ROOTS):
                raise fault(
                    f"'{key}' has '{pattern}', which must begin with one of {', '.join(_ROOTS)}"
                )
        return patterns

    return Annotated[Any, _texts(key), AfterValidator(rooted)]
