"""The experiments of simulation.yaml, and the budgets that stand beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from models.contract.errors import SettingError
from models.contract.settings_schema import (
    Value,
    build,
    defaults,
    setting,
    unknown_key,
    unknown_name,
)
from server_app.config.settings import flat_values, known_defaults

S = TypeVar("S")

SIMULATION_FILE = "simulation.yaml"


@dataclass(frozen=True)
class Experiment:
    """A named experiment of simulation.yaml: settings, resources, and the grid to tune over."""

    name: str
    values: Mapping[str, Value]
    resources: Mapping[str, Value]
    grid: Mapping[str, Sequence[Value]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """The budget of tuning, the same for every experiment."""

    trials: int = setting(16, "points of the grid that are tried", minimum=1)
    folds: int = setting(5, "validation folds of the training data", minimum=2)
    seeds: int = setting(3, "seeds, each with another shuffling into folds", minimum=1)


def read_experiments(path: Path) -> dict[str, Experiment]:
    """Return the experiments of a simulation file; ``base`` names one whose settings come first.

    Raises:
        SettingError: the file is missing, no YAML, or an experiment is malformed.
    """
    content = _read_yaml(path)
    if not isinstance(content.get("experiments"), dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    raw = content["experiments"]
    return {name: _experiment(name, raw, path, ()) for name in raw}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read ({error.strerror}): run this in fedsilo's "
            "folder or name the file by --file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SettingError(f"{path} has no mapping 'experiments'")
    return content


def _experiment(name: str, raw: Mapping[str, Any], path: Path, seen: tuple[str, ...]) -> Experiment:
    if name not in raw:
        raise unknown_name("experiment", name, raw)
    if name in seen:
        raise SettingError(
            f"{path}: experiments {' -> '.join((*seen, name))} are based on one another"
        )
    content = raw[name]
    if not _well_formed(content):
        raise SettingError(
            f"{path}: experiment '{name}' must be a mapping, and so must its config, grid and "
            "resources"
        )
    surplus = set(content) - {"base", "config", "resources", "about", "grid"}
    if surplus:
        raise SettingError(
            f"{path}: experiment '{name}' has unknown parts {sorted(surplus)}; "
            "allowed are about, base, config, grid and resources"
        )
    where = f"{path}: experiment '{name}'"
    values: dict[str, Value] = {}
    resources: dict[str, Value] = {}
    grid: dict[str, Sequence[Value]] = {}
    if "base" in content:
        base = _experiment(content["base"], raw, path, (*seen, name))
        values, resources, grid = dict(base.values), dict(base.resources), dict(base.grid)
    values |= flat_values(content.get("config") or {}, where)
    resources |= flat_values(content.get("resources") or {}, where)
    grid |= _grid(content.get("grid") or {}, where)
    return Experiment(name, values, resources, grid)


def _grid(content: Mapping[str, Any], where: str) -> dict[str, Sequence[Value]]:
    known = known_defaults()
    for key, values in content.items():
        if key not in known:
            raise unknown_key(key, known)
        if not isinstance(values, list) or not values:
            raise SettingError(f"{where}: grid of '{key}' is {values!r}; it must be a list")
        for value in values:
            flat_values({key: value}, f"{where}, grid")
    return dict(content)


def read_tuning(path: Path) -> Tuning:
    """Return the budget under ``tuning`` in a simulation file.

    Raises:
        SettingError: the file cannot be read, or the budget is malformed.
    """
    return read_section(path, "tuning", Tuning)


def read_section(path: Path, name: str, cls: type[S]) -> S:
    """Return a section of a simulation file as ``cls``, its defaults if there is none.

    Raises:
        SettingError: the file cannot be read, or the section is malformed.
    """
    raw = _read_yaml(path).get(name) or {}
    if not isinstance(raw, dict):
        raise SettingError(f"{path}: '{name}' must be a mapping")
    for key in raw:
        if key not in defaults(cls):
            raise unknown_key(f"{name}: {key}", [f"{name}: {known}" for known in defaults(cls)])
    return build(cls, raw)


_PARTS = ("config", "resources", "grid")


def _well_formed(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and all(isinstance(content.get(part) or {}, dict) for part in _PARTS)
        and isinstance(content.get("base", ""), str)
    )


def find_experiment(path: Path, name: str) -> Experiment:
    """Return the experiment ``name`` of a simulation file."""
    experiments = read_experiments(path)
    if name not in experiments:
        raise unknown_name("experiment", name, experiments)
    return experiments[name]
