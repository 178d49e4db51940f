"""The form of an experiment in simulation.yaml, as a model. Imported when a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from fedsilo.datasets.io.declarations import Declared, Fault, checked, fault
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.one_line import shown
from fedsilo.models.contract.settings_schema import Value, unknown_key
from fedsilo.server_app.config.old_keys import key_of_today
from fedsilo.server_app.config.settings import declared_defaults, flat_values


def _mapping(content: Any) -> Any:
    """Return a part that is there, or an empty one; another value is for pydantic to refuse."""
    content = content or {}
    for key in content if isinstance(content, dict) else ():
        if not isinstance(key, str):
            raise fault(f"'{key}' is no text: a key must be one, write it in quotes")
    return content


def _flat(content: Any) -> Any:
    content = _mapping(content)
    return _flat_or_fault(content) if isinstance(content, dict) else content


def _flat_or_fault(values: dict[str, Any], where: str = "") -> dict[str, Value]:
    try:
        return flat_values(values, where)
    except SettingError as error:
        raise fault(str(error).removeprefix(": ")) from None


def _grid(content: Any) -> Any:
    content = _mapping(content)
    if not isinstance(content, dict):
        return content
    known = declared_defaults() if content else {}
    if not content.keys() <= known.keys():
        content = {key_of_today(k) if isinstance(k, str) else k: v for k, v in content.items()}
    for key, values in content.items():
        if key not in known:
            raise fault(str(unknown_key(key, known)))
        if not isinstance(values, list) or not values:
            raise fault(f"grid of '{key}' is {shown(values)}; it must be a list")
        for value in values:
            _flat_or_fault({key: value}, "grid")
    return content


class Parts(Declared):
    """An experiment as the file has it: its own part, without what its base says."""

    model_config = ConfigDict(title="an experiment")

    about: Any = None
    base: str = ""
    config: Annotated[dict[str, Any], BeforeValidator(_flat)] = Field(default_factory=dict)
    grid: Annotated[dict[str, Any], BeforeValidator(_grid)] = Field(default_factory=dict)
    resources: Annotated[dict[str, Any], BeforeValidator(_flat)] = Field(default_factory=dict)


def parts(name: Any, content: Any, path: Path) -> Parts:
    """Return an experiment's own part.

    Raises:
        SettingError: it is malformed, or its name is no text.
    """
    if not isinstance(name, str) or len(name.splitlines()) != 1:
        shown = " ".join(str(name).split())
        raise SettingError(f"{path}: experiment '{shown}' must have a text of one line as its name")
    where = f"{path}: experiment '{name}'"

    def refusal(flaw: Fault) -> SettingError:
        if flaw.kind == "unknown":
            return SettingError(
                f"{where} has unknown parts ['{flaw.key}']; allowed are "
                "about, base, config, grid and resources"
            )
        if flaw.kind == "shape":
            return SettingError(
                f"{where} must be a mapping, and so must its config, grid and resources"
            )
        return SettingError(f"{where}: {flaw.sentence}")

    return checked(Parts, content, refusal)
