"""One path for every setting: run config, TOML file, ``--set`` and simulation.yaml's experiments.

All of them end as a flat mapping of kebab-case keys, a method's own with its group before them
(``uefl.gamma``), which ``resolve`` turns into the common settings and the method's own, or refuses
before anything is trained. In files a group may be a table: ``[uefl]`` with ``gamma``.
"""

import datetime
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.text_files import file_fault
from fedsilo.datasets.registry import check_data_settings, data_set, plugs_of, silo_count
from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.methods import METHODS, load_plugin_files, settings_class
from fedsilo.models.contract.one_line import one_line, shown
from fedsilo.models.contract.plugs import (
    PINS,
    digests_text,
    other_plugs,
    plug_digests,
    with_plugin_settings,
)
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import (
    FORMER,
    Value,
    as_mapping,
    build,
    defaults,
    keys_with,
    unknown_key,
)
from fedsilo.models.maths.pacing import check_pace
from fedsilo.models.networks.kinds import check_network_settings
from fedsilo.server_app.config.speeds import declared_speeds
from fedsilo.server_app.config.training import check_training

PROJECT_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"
_MOST_BYTES = 2**20
RUN_FORMAT = 2  # of a run directory, as its config.toml says; another one is refused
_NO_SETTINGS = ("format", "launch", "environment")  # what else config.toml has

# Texts of YAML, which a file may have as mappings or lists
_STRUCTURED = frozenset(keys_with(CommonSettings, "structured"))
# They do not change the result of a run
_CIRCUMSTANCES = frozenset(keys_with(CommonSettings, "circumstance"))


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
        values = self.as_mapping().items()
        # An empty one is left out: runs of before plugs have the same
        return {k: v for k, v in values if k not in _CIRCUMSTANCES and (v or k != PINS)}

    def run_config(self) -> dict[str, Any]:
        """Return the settings as ``flwr run`` takes them, which knows the keys of pyproject.toml.

        A plugged method's own are one text, 'plugin-settings'.
        """
        values, own = self.as_mapping(), as_mapping(self.own)
        foreign = {key: own[key] for key in own.keys() - declared_defaults().keys()}
        carried: dict[str, Value] = {"plugin-settings": json.dumps(foreign)} if foreign else {}
        return grouped({k: v for k, v in values.items() if k not in foreign} | carried)

    def pinned(self) -> "RunSettings":
        """Return the settings with each plug's SHA-256; SettingError if they have another."""
        stated = self.common.plugin_digests
        if not (plugs := plugs_of(self.common)) and not stated:
            return self
        digests = plug_digests(plugs)
        if stated and (other := other_plugs(digests, stated)):
            raise SettingError(
                f"plug {' and '.join(other)} is not the one of 'plugin-digests', which the run "
                "began with: bring that one back, or start a new run"
            )
        pinned = replace(self.common, plugin_digests=digests_text(digests))
        return replace(self, common=pinned)


@dataclass(frozen=True)
class RunConfig:
    """What config.toml of a run directory says.

    Attributes:
        settings: every setting of the run, by key.
        launch: how it was launched: engine and resources.
        environment: what it was made with: versions of fedsilo, Python, packages.
    """

    settings: dict[str, Value]
    launch: dict[str, Any]
    environment: dict[str, Any]


def differences(before: Mapping[str, Value], now: Mapping[str, Value]) -> str:
    """Say which settings differ between two runs, empty if none does."""
    differing = [
        f"{key} is {shown(before.get(key, 'unset'))} there and {shown(now.get(key, 'unset'))} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    return "; ".join(differing)


def known_defaults() -> dict[str, Value]:
    """Return every key of every method with its default: pyproject's run config must match."""
    known = defaults(CommonSettings)
    for method in METHODS:
        known |= defaults(settings_class(method))
    return known


@cache
def declared_defaults() -> Mapping[str, Value]:
    """Return what ``known_defaults`` does from pyproject.toml, without importing any method."""
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))
    return flat_values(project["tool"]["flwr"]["app"]["config"], str(PROJECT_FILE))


def resolve(values: Mapping[str, Value]) -> RunSettings:
    """Build the settings of a run from keys and values; missing keys take their defaults.

    Raises:
        SettingError: a key is unknown or of another method, a value has the wrong type or range,
            method or data set are unknown, or settings contradict each other.
    """
    from fedsilo.models.privacy.promises import check_privacy_settings
    from fedsilo.strategies.loop.round_loop import refuse_site_count
    from fedsilo.strategies.methods.registry import strategy_class

    if values.get("plugin-settings"):
        values = with_plugin_settings(values)
    known = known_defaults()
    if values.get("plugin"):
        load_plugin_files(str(values["plugin"]))
    method = str(values.get("method", CommonSettings.method))
    if method not in METHODS:
        known |= _plugged_defaults(method, known)
    for key in values:
        if key not in known:
            raise unknown_key(key, known)
    common = build(CommonSettings, values)
    cls = strategy_class(common.method)
    check_data_settings(common)
    check_network_settings(common)
    check_pace(common)
    is_table = data_set(common.dataset).is_table
    check_training(common, is_table)
    cls.capabilities.refuse_more(common, is_table)
    _refuse_foreign_keys(values, common.method, known)
    own: Any = build(settings_class(common.method), values)
    check_privacy_settings(common, is_table)
    if (silos := silo_count(common)) is not None:
        if common.min_sites > silos:
            raise SettingError(
                f"setting 'min-sites' is {common.min_sites}, more than there are silos ({silos})"
            )
        refuse_site_count(common, silos)
    if common.speeds:
        declared_speeds(common.speeds)
    own.check(common, is_table)
    return RunSettings(common, own)


def _plugged_defaults(method: str, known: Mapping[str, Value]) -> dict[str, Value]:
    """Return a plugged method's keys with defaults; SettingError if its group is another's."""
    cls = settings_class(method)
    group = str(vars(cls).get("group", ""))
    ours = {key.partition(".")[0] for key in known if "." in key}
    if group in {*ours, *METHODS} and not cls.__module__.startswith("fedsilo."):
        raise SettingError(
            f"method '{method}': the group '{group}' of its settings is taken; give class "
            f"{cls.__name__} another 'group'"
        )
    return defaults(cls)


def _refuse_foreign_keys(
    values: Mapping[str, Value], method: str, known: Mapping[str, Value]
) -> None:
    """Refuse another method's key, unless it has its default as Flower's run config fills it in."""
    used = defaults(CommonSettings) | defaults(settings_class(method))
    for key, value in values.items():
        if key not in used and value != known[key]:
            raise SettingError(f"setting '{key}' is not one of method '{method}': remove it")


def read_toml(path: Path) -> dict[str, Value]:
    """Return the settings of a TOML file, which may be a run directory's config.toml.

    Raises:
        SettingError: the file is missing, no TOML, or nested more deeply than by groups.
    """
    content = _parse_toml(path)
    settings = {key: value for key, value in content.items() if key not in _NO_SETTINGS}
    return flat_values(settings, str(path))


def _parse_toml(path: Path) -> dict[str, Any]:
    if fault := file_fault(path, _MOST_BYTES):
        raise SettingError(f"{path} {fault}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML or UTF-8, or numbers of 5000 digits
        raise SettingError(f"{path} is not valid TOML: {one_line(error, 200)}") from None


def read_run_config(config: Path) -> RunConfig:
    """Return what a run directory's config.toml says; RunDirectoryError for another format."""
    content = _parse_toml(config)
    if content.pop("format", None) != RUN_FORMAT:
        raise RunDirectoryError(
            f"{config.parent} was made by another version of fedsilo: start a new run"
        )
    launch, environment = (content.pop(key, {}) for key in ("launch", "environment"))
    flat = flat_values(content, str(config))
    # A key that runs no longer have changes nothing where it was as it always is now
    values = {key: value for key, value in flat.items() if FORMER.get(key) != value}
    return RunConfig(values, launch, environment)


def parse_assignment(text: str) -> tuple[str, Value]:
    """Read ``key=value``; a value that is no TOML value is taken as a text.

    Raises:
        SettingError: there is no '=' or the value is a list or table.
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise SettingError(f"{shown(text)} is not a setting: write key=value, for example rounds=5")
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except (ValueError, RecursionError):
        parsed = {"value": raw.strip()}
    if parsed.keys() != {"value"}:
        raise SettingError(f"{shown(text)} is more than one setting: give each its own --set")
    value = parsed["value"]
    if isinstance(value, datetime.date | datetime.time):
        value = raw.strip()  # a bare name such as 2024-01-01
    name = key.strip()
    flat = flat_values({name: value}, f"--set {one_line(text, 100)}")
    if name not in flat:
        raise SettingError(f"--set {one_line(text, 100)}: '{name}' must be given one value")
    return name, flat[name]


def flat_values(content: Mapping[str, Any], where: str = "") -> dict[str, Value]:
    """Return keys and values; of a group, a mapping, each with the group's name before it.

    What is a text of YAML may be the mapping or list itself.

    Raises:
        SettingError: a value is a list, or a mapping within a group; ``where`` names the source.
    """
    flat: dict[str, Value] = {}
    for key, declared in content.items():
        written = key in _STRUCTURED and isinstance(declared, dict | list)
        value = json.dumps(declared) if written else declared
        members = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else None
        for name, member in (members or {key: value}).items():
            if not isinstance(member, bool | int | float | str):
                raise SettingError(
                    f"{where and f'{where}: '}setting '{one_line(name, 100)}' is {shown(member)}; "
                    "it must be true or false, a number or a text"
                )
            flat[name] = member
    return flat


def grouped(values: Mapping[str, Value]) -> dict[str, Any]:
    """Return keys and values with each group as a mapping of its own, as TOML has tables."""
    tables: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for key, value in values.items():
        group, dot, rest = key.partition(".")
        if dot:
            tables.setdefault(group, {})[rest] = value
    return tables
