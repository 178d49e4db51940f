"""One path for every setting: run config, TOML file, ``--set`` and simulation.yaml.

All of them end as a flat mapping of kebab-case keys, which ``resolve`` turns into the common
settings and the method's own, or refuses before anything is trained.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from datasets.registry import check_data_settings, data_set, silo_count
from models.contract.errors import SettingError
from models.contract.methods import METHODS, settings_class
from models.contract.settings import CommonSettings
from models.contract.settings_schema import (
    Value,
    as_mapping,
    build,
    defaults,
    setting,
    unknown_key,
    unknown_name,
)
from models.maths.pacing import check_pace
from models.networks.kinds import check_network_settings
from models.privacy.gaussian_mechanism import check_privacy_settings
from strategies.methods.registry import strategy_class

S = TypeVar("S")

SIMULATION_FILE = "simulation.yaml"

# Where a run lies and how it is waited for; they do not change its result.
_CIRCUMSTANCES = (
    "data-dir",
    "cache-dir",
    "out",
    "run-name",
    "resume",
    "min-sites",
    "reply-timeout",
    "away-timeout",
    "join-timeout",
)


@dataclass(frozen=True)
class RunSettings:
    """All settings of a run: the common ones and the method's own."""

    common: CommonSettings
    own: Any

    def as_mapping(self) -> dict[str, Value]:
        """Return every key that the run uses, with its value."""
        return as_mapping(self.common) | as_mapping(self.own)

    def decisive(self) -> dict[str, Value]:
        """Return the settings that the result depends on; a resumed run must have the same."""
        return {k: v for k, v in self.as_mapping().items() if k not in _CIRCUMSTANCES}


def differences(before: Mapping[str, Value], now: Mapping[str, Value]) -> str:
    """Say which settings differ between two runs, empty if none does."""
    told = [
        f"{key} is {before.get(key, 'unset')!r} there and {now.get(key, 'unset')!r} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    return "; ".join(told)


def known_defaults() -> dict[str, Value]:
    """Return every key of every method with its default: pyproject's run config must match."""
    known = defaults(CommonSettings)
    for method in METHODS:
        known |= defaults(settings_class(method))
    return known


def resolve(values: Mapping[str, Value]) -> RunSettings:
    """Build the settings of a run from keys and values; missing keys take their defaults.

    Raises:
        SettingError: a key is unknown or of another method, a value has the wrong type or range,
            method or data set are unknown, or settings contradict each other.
    """
    known = known_defaults()
    for key in values:
        if key not in known:
            raise unknown_key(key, known)
    common = build(CommonSettings, values)
    cls = strategy_class(common.method)
    check_data_settings(common)
    check_network_settings(common)
    check_pace(common)
    is_table = data_set(common.dataset).is_table
    cls.capabilities.refuse_more(common, is_table)
    _refuse_foreign_keys(values, common.method, known)
    own: Any = build(settings_class(common.method), values)
    check_privacy_settings(common, is_table)
    silos = silo_count(common)
    if silos is not None and common.min_sites > silos:
        raise SettingError(
            f"setting 'min-sites' is {common.min_sites}, more than there are silos ({silos})"
        )
    cls.check_settings(common, own)
    return RunSettings(common, own)


def _refuse_foreign_keys(
    values: Mapping[str, Value], method: str, known: Mapping[str, Value]
) -> None:
    """Refuse another method's key, unless it has its default as Flower's run config fills it in."""
    used = defaults(CommonSettings) | defaults(settings_class(method))
    for key, value in values.items():
        if key not in used and value != known[key]:
            raise SettingError(f"setting '{key}' is not one of method '{method}': remove it")


def read_toml(path: Path) -> dict[str, Value]:
    """Return the settings of a TOML file.

    Raises:
        SettingError: the file is missing, no TOML, or nested.
    """
    return _flat(_parse_toml(path), str(path))


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is no valid TOML: {error}") from None


def run_values(config: Path) -> dict[str, Value]:
    """Return the settings of a run directory's config.toml, without its environment."""
    return {k: v for k, v in _parse_toml(config).items() if not isinstance(v, dict)}


def launch_values(config: Path) -> dict[str, Any]:
    """Return how a run directory's run was launched: engine and resources."""
    return dict(_parse_toml(config).get("launch", {}))


def parse_assignment(text: str) -> tuple[str, Value]:
    """Read ``key=value``; a value that is no TOML value is taken as a text.

    Raises:
        SettingError: there is no '=' or the value is a list or table.
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise SettingError(f"'{text}' is no setting: write key=value, for example rounds=5")
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": raw.strip()}
    if parsed.keys() != {"value"}:
        raise SettingError(f"'{text}' is more than one setting: give each its own --set")
    value = parsed["value"]
    if isinstance(value, datetime.date | datetime.time):
        value = raw.strip()  # a bare name such as 2024-01-01
    name = key.strip()
    return name, _flat({name: value}, f"--set {text}")[name]


def _flat(content: Mapping[str, Any], where: str) -> dict[str, Value]:
    for key, value in content.items():
        if not isinstance(value, bool | int | float | str):
            raise SettingError(
                f"{where}: setting '{key}' is {value!r}; it must be true or false, "
                "a number or a text"
            )
    return dict(content)


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
    values |= _flat(content.get("config") or {}, where)
    resources |= _flat(content.get("resources") or {}, where)
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
            _flat({key: value}, f"{where}, grid")
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
