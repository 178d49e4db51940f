"""Reads settings from all sources: run config, TOML file, ``--set`` and simulation.yaml.

Each source becomes a flat mapping of kebab-case keys, which begin with their group
(``train.learning-rate``, ``uefl.gamma``). In a file, a group may be a table: ``[uefl]`` with
``gamma``. ``resolve`` builds the common settings and the method's own settings from the mapping, or
refuses the mapping before training starts.
"""

import datetime
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedsilo.core import plugins
from fedsilo.core.errors import RunDirectoryError, SettingError, unknown_key
from fedsilo.core.files.locations import installed_folder
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.methods import OURS, known_defaults, load_plugin_files, settings_class
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import ADDED, RENAMED, current_settings, tell_renamed
from fedsilo.core.settings.written_settings import flat_values, group_settings
from fedsilo.core.settings_schema import (
    Value,
    as_mapping,
    build,
    defaults,
    keys_in,
    keys_with,
    values_of,
)
from fedsilo.datasets import registry
from fedsilo.models.maths.pacing import check_pace
from fedsilo.models.networks.kinds import check_network_settings
from fedsilo.server_app.config.training import check_task, check_training
from fedsilo.server_app.config.trusted_plugins import approve_plugins, remember_plugins

PROJECT_FILE = installed_folder() / "pyproject.toml"
_MOST_BYTES = 2**20
RUN_FORMAT = 2  # the format number in config.toml; a run directory with another one is refused
_NO_SETTINGS = ("format", "launch", "environment")  # entries of config.toml that are not settings

# Settings that do not change the result of a run, so a resumed run may change them
CIRCUMSTANCES = frozenset(
    keys_in(CommonSettings, "run")
    + keys_with(CommonSettings, "files")
    + ("plugin", "plugin-settings")
)


@dataclass(frozen=True)
class RunSettings(Mapping[str, Value]):
    """All settings of a run, common and the method's own. As a mapping, it gives a value by key."""

    common: CommonSettings
    own: Any

    def __getitem__(self, key: str) -> Value:
        return self.as_mapping()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_mapping())

    def __len__(self) -> int:
        return len(self.as_mapping())

    def as_mapping(self) -> dict[str, Value]:
        """Return key -> value of every setting that the run uses."""
        return as_mapping(self.common) | as_mapping(self.own)

    def decisive(self) -> dict[str, Value]:
        """Return the settings that decide a run's result, by key.

        A run can be resumed only with the same decisive settings. Settings in ``CIRCUMSTANCES`` do
        not change the result, such as the run's name, and are left out. Settings in ``ADDED`` are
        newer than fedsilo 0.1. They are left out if they have their defaults, because checkpoints
        of older runs lack them.
        """
        decisive = self.as_mapping()
        for key in CIRCUMSTANCES:
            decisive.pop(key, None)
        for key, default in ADDED.items():
            if decisive.get(key) == default:
                del decisive[key]
        return decisive

    def run_config(self) -> dict[str, Any]:
        """Return the settings as the run config of ``flwr run``, with one nested mapping per group.

        The group of a setting is the part of its key before the dot. Settings without a group are
        at the top level. ``flwr run`` accepts only keys that pyproject.toml declares. A plugin
        method may have undeclared settings, which are joined into one JSON string: full key ->
        value. This string is under 'plugin-settings' at the top level.
        """
        values = self.as_mapping()
        foreign, declared = {}, declared_defaults()
        for key in as_mapping(self.own):
            if key not in declared:
                foreign[key] = values.pop(key)
        if foreign:
            values["plugin-settings"] = json.dumps(foreign)
        return group_settings(values)

    def pin_plugins(self) -> "RunSettings":
        """Return the settings with 'plugin-digests' set to the SHA-256 of each plugin in use.

        The plugins in use are imported for this. Their digests are added to this user's file of
        trusted plugins, so that the user can read the run later. All files in 'plugin' are added
        too, even if no setting uses them. If no plugin is in use and 'plugin-digests' is empty, the
        settings are returned unchanged.

        Raises:
            SettingError: a plugin cannot be imported, or 'plugin-digests' is set but does not match
                the plugins in use.
        """
        stated = self.common.plugin_digests
        plugs = registry.plugs_of(self.common)
        if not plugs and not stated:
            return self
        digests = plugins.digest_plugins(plugs)
        if stated:
            other = plugins.changed_plugins(digests, stated)
            if other:
                raise plugins.other_version(other)
        remember_plugins(digests | plugins.file_digests(plugins.plugin_entries(self.common.plugin)))
        pinned = replace(self.common, plugin_digests=plugins.digests_text(digests))
        return replace(self, common=pinned)


@dataclass(frozen=True)
class RunConfig:
    """The content of a run directory's config.toml.

    Attributes:
        settings: every setting of the run, by key.
        launch: the engine and the resources; empty if the file has none.
        environment: the versions of fedsilo, Python and packages.
    """

    settings: dict[str, Value]
    launch: dict[str, Any]
    environment: dict[str, Any]


def differences(before: Mapping[str, Value], now: Mapping[str, Value]) -> str:
    """Describe in one line the settings that differ between two runs.

    An example is "seed is 1 there and 2 here", in which "there" means ``before`` and "here" means
    ``now``. Settings are in alphabetical order, separated by semicolons. A missing setting has the
    value 'unset'. Each value is cut after 100 characters. The text is empty if no setting differs.
    """
    differing = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            there, here = quote_value(before.get(key, "unset")), quote_value(now.get(key, "unset"))
            differing.append(f"{key} is {there} there and {here} here")
    return "; ".join(differing)


@cache
def declared_defaults() -> Mapping[str, Value]:
    """Read the defaults of fedsilo's settings from pyproject.toml, without importing any method."""
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))
    return flat_values(project["tool"]["flwr"]["app"]["config"], str(PROJECT_FILE))


def resolve(values: Mapping[str, Value]) -> RunSettings:
    """Build the settings of a run from keys and values, and check that they fit together.

    A missing key takes its default. A key that an earlier version of fedsilo used is accepted, with
    a note in the log. The plugin files that the setting 'plugin' names are executed, because they
    may define the method.

    Raises:
        SettingError: a key is unknown or belongs to another method, a value has the wrong type or
            range, the method or the data set is unknown, a plugin cannot be used, or settings
            contradict each other.
    """
    from fedsilo.models.privacy.promises import check_privacy_settings
    from fedsilo.strategies.loop.round_loop import refuse_site_count
    from fedsilo.strategies.methods.registry import strategy_class

    settings = _build_settings(values)
    common = settings.common
    cls = strategy_class(common.method)
    # The general checks come first, because the method's checks may rely on them
    registry.check_data_settings(common)
    check_network_settings(common)
    check_pace(common)
    is_table = registry.data_set(common.dataset).is_table
    check_training(common, is_table)
    cls.capabilities.refuse_more(common, is_table)
    check_privacy_settings(common, is_table)
    check_task(common, settings.own, is_table)
    silos = _possible_sites(common)
    # The number is None if only the hospitals know it. Then the sites that answer are counted
    if silos is not None:
        if common.min_sites > silos:
            raise SettingError(
                f"setting 'run.min-sites' must be at most the number of silos, {silos}, but is "
                f"{common.min_sites}"
            )
        refuse_site_count(common, silos)
    settings.own.check(common, is_table)
    return settings


def _possible_sites(common: CommonSettings) -> int | None:
    """Return the largest number of sites that can take part in a run, or None if it is unknown.

    If 'server.sites' names the sites, the result is the number of names. Otherwise it is the number
    of silos: the parts of the data set, one per site. The number of silos is unknown, for example,
    if only files at the hospitals define the silos.

    Raises:
        SettingError: 'server.sites' is not valid, or names more sites than there are silos.
    """
    from fedsilo.strategies.meeting.terms import split_sites

    silos, sites = registry.silo_count(common), split_sites(common.sites)
    if not sites:
        return silos
    if silos is not None and len(sites) > silos:
        raise SettingError(
            f"setting 'server.sites' names {len(sites)} sites, but there are {silos} silos"
        )
    return len(sites)


def _build_settings(values: Mapping[str, Value]) -> RunSettings:
    """Build settings with valid keys, types and ranges, without checking that they fit together.

    The plugin files in the setting 'plugin' are executed, because they may define the method. A key
    that an earlier version of fedsilo used is accepted, with a note in the log. Settings of other
    methods and removed settings are dropped. They must have their default values.

    Raises:
        SettingError: a key is unknown, a value has the wrong type or range, the method is unknown,
            a plugin file cannot be used, or a setting to be dropped does not have its default.
    """
    values = current_settings(values)
    tell_renamed()
    if values.get("plugin-settings"):
        values = plugins.with_plugin_settings(values, defaults(CommonSettings))
    known = known_defaults()
    if values.get("plugin"):
        load_plugin_files(
            str(values["plugin"]), plugins.stated_digests(str(values.get(plugins.PINS, "")))
        )
    method = str(values.get("method", CommonSettings.method))
    if method not in OURS:
        known |= _plugin_defaults(method, known)
    for key in values:
        if key not in known:
            raise unknown_key(key, known)
    # Unknown keys are refused before any value is read, because a misspelt key explains more
    common = build(CommonSettings, values_of(CommonSettings, values))
    cls = settings_class(common.method)
    _refuse_foreign_keys(values, common.method, known)
    return RunSettings(common, build(cls, values_of(cls, values)))


def resolve_recorded(values: Mapping[str, Value]) -> RunSettings:
    """Build and check the settings of a recorded run, whose author need not be trustworthy.

    A plugin in use is executed only if its SHA-256 is the recorded one and the user trusts it. The
    user trusts plugins that --plugin names, that the user has run before, or that an installed
    package offers to fedsilo. Modules are not imported from the working folder, which may be the
    run directory. A key of an earlier version of fedsilo becomes the current key.

    Raises:
        SettingError: a setting is invalid, settings contradict each other, or a plugin may not be
            executed or cannot be imported.
    """
    # Keys are renamed first, so that a plugin under a former key is not overlooked
    values = current_settings(values, quietly=True)
    with plugins.without_working_folder():
        return resolve(approve_plugins(values, registry.plugin_modules(values)))


def read_recorded(values: Mapping[str, Value]) -> RunSettings:
    """Build the settings of a recorded run, without checking that they fit together.

    Old runs stay readable in this way, even if fedsilo now refuses their combination of settings.
    Former names of settings are converted to today's. A plugin is executed only if the user trusts
    it and its SHA-256 is the recorded one. Code that opens data or networks must call
    ``resolve_recorded`` instead, which checks everything.

    Raises:
        SettingError: a single setting is not valid, or a plugin in use is not trusted, has another
            SHA-256 or cannot be imported.
    """
    values = current_settings(values, quietly=True)
    with plugins.without_working_folder():
        return _build_settings(approve_plugins(values, registry.plugin_modules(values)))


def _plugin_defaults(method: str, known: Mapping[str, Value]) -> dict[str, Value]:
    """Return key -> default for the settings of a plugin method, and refuse a taken group name.

    The group of a setting is the part of its key before the dot. A plugin's group must not be one
    of fedsilo's groups, nor the name of a built-in method. A plugin that uses a settings class of
    fedsilo itself may share that class's group.

    Args:
        method: the name of the plugin method.
        known: key -> default for all of fedsilo's own settings.

    Raises:
        SettingError: no plugin has that name, or its group name is already in use.
    """
    cls = settings_class(method)
    group = str(vars(cls).get("group", ""))
    ours = set()
    for key in known:
        before_dot, dot, _ = key.partition(".")
        if dot:
            ours.add(before_dot)
    if group in {*ours, *OURS} and not cls.__module__.startswith("fedsilo."):
        raise SettingError(
            f"method '{method}': the group '{group}' of its settings is taken; give class "
            f"{cls.__name__} another 'group'"
        )
    return defaults(cls)


def _refuse_foreign_keys(
    values: Mapping[str, Value], method: str, known: Mapping[str, Value]
) -> None:
    """Check that settings of methods other than ``method`` have their default values.

    Flower's run config contains the defaults of all methods, so such defaults are accepted.
    Settings of ``method`` and settings common to all methods may have any value.

    Args:
        values: settings by key.
        method: the run's method.
        known: key -> default for every key that may occur in ``values``.

    Raises:
        SettingError: a setting of another method does not have its default value. Only the first
            such setting is named.
    """
    used = defaults(CommonSettings) | defaults(settings_class(method))
    for key, value in values.items():
        if key not in used and value != known[key]:
            raise SettingError(f"method '{method}' has no setting '{key}': remove it")


def read_toml(path: Path) -> dict[str, Value]:
    """Read the settings of a TOML file, such as a run directory's config.toml: key -> value.

    The entries "format", "launch" and "environment" are not settings, and are left out. Unknown
    keys are kept. A setting that takes YAML text may be a list or a table, which becomes JSON text.
    A key of an earlier version of fedsilo becomes the current key. The log will name the earlier
    key, unless "format" marks the file as a run's record.

    Raises:
        SettingError: the file is missing, is larger than 1 MiB, or is not valid TOML. The error is
            also raised if a setting is given twice, or is not a bool, a number or a string.
    """
    content = _parse_toml(path)
    # A run's record may have key names of an older version, which the user need not change
    is_record = "format" in content
    for key in _NO_SETTINGS:
        content.pop(key, None)
    return flat_values(content, str(path), quietly=is_record)


def _parse_toml(path: Path) -> dict[str, Any]:
    # Checked before the file is opened, because reading a pipe would wait for its writer
    fault = file_fault(path, _MOST_BYTES)
    if not fault:
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        except (ValueError, RecursionError) as error:  # not TOML or UTF-8, numbers of 5000 digits
            fault = f"is not valid TOML: {one_line(error, 200)}"
    raise SettingError(f"{path} {fault}")


def read_run_config(config: Path) -> RunConfig:
    """Read a run directory's config.toml, the record of the run's settings and environment.

    A setting that has been renamed since the run has its current key in the result.

    Returns:
        The three parts of the file. ``settings`` maps full keys, such as 'train.class-weights', to
        values. The ranges of the values are not checked. ``launch`` has the engine and the
        resources. ``environment`` has the versions of software. ``launch`` and ``environment`` are
        empty if the file lacks them.

    Raises:
        RunDirectoryError: another version of fedsilo wrote the file, or one of its tables is
            malformed.
        SettingError: the file cannot be read or is not valid TOML, a setting is not a single value,
            or fedsilo has removed a setting that the run uses.
    """
    content = _parse_toml(config)
    if content.pop("format", None) != RUN_FORMAT:
        raise RunDirectoryError(
            f"{config.parent} was written by another version of fedsilo: start a new run"
        )
    launch = _check_table(content.pop("launch", {}), "launch", config)
    environment = _check_table(content.pop("environment", {}), "environment", config)
    _check_table(launch.get("resources", {}), "launch.resources", config)
    _check_table(environment.get("packages", {}), "environment.packages", config)
    settings = flat_values(content, str(config), quietly=True)
    settings = current_settings(settings, str(config), quietly=True)
    return RunConfig(settings, launch, environment)


def _check_table(content: Any, name: str, config: Path) -> dict[str, Any]:
    """Check that an entry of config.toml is a table, and return a shallow copy of the table.

    Each value must be a bool, a number, a string or another table. The content of such inner tables
    is not checked here.

    Args:
        content: the entry, as parsed.
        name: the name of the entry, for errors.
        config: the path of config.toml, for errors.

    Raises:
        RunDirectoryError: the entry is not a table, or a value has another type, such as a list.
            The first wrong value is named.
    """
    fault = _find_table_fault(content, name)
    if fault:
        raise RunDirectoryError(f"{config} does not have the expected form: {fault}")
    return dict(content)


def _find_table_fault(content: Any, name: str) -> str | None:
    """Describe the first fault of an entry of config.toml that must be a table.

    Each value of the table must be a bool, a number, a string or another table.

    Args:
        content: the entry, as parsed.
        name: the name of the entry, for the description.

    Returns:
        The description, or None if the entry has no fault.
    """
    if not isinstance(content, dict):
        return f"'{name}' must be a table"
    for key, value in content.items():
        if not isinstance(value, bool | int | float | str | dict):
            return f"'{name}.{one_line(key, 80)}' must be a single value"
    return None


def parse_assignment(text: str) -> tuple[str, Value]:
    """Parse ``key=value``, as given to the option ``--set``, into a key and a value.

    The value is read as TOML. Text that is not valid TOML stays a string, and so does a date or a
    time. A list or a table becomes JSON text, but only for a setting that takes YAML text. A key of
    an earlier version of fedsilo becomes the current key. Unknown keys are accepted.

    Raises:
        SettingError: there is no '=', the key is empty, or the value is a list or a table although
            the setting does not take YAML text.
    """
    name, value = parse_pair(text)
    source = f"--set {one_line(text, 100)}"
    flat = list(flat_values({name: value}, source).items())
    if len(flat) != 1 or flat[0][0] not in (name, RENAMED.get(name)):
        raise SettingError(f"{source}: '{name}' must be given one value")
    return flat[0]


def parse_pair(text: str) -> tuple[str, Any]:
    """Parse ``key=value`` into a key and a value. The key is not checked.

    The value is read as TOML, so it may be a list or a table. Text that is not valid TOML stays a
    string, and so does a date or a time. An empty value is an empty string. Spaces around the key
    and the value are removed.

    Raises:
        SettingError: there is no '=', the key is empty, or the text assigns several keys, one per
            line.
    """
    key, equals, raw = text.partition("=")
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except (ValueError, RecursionError):
        parsed = {"value": raw.strip()}
    fault = ""
    if not equals or not key.strip():
        fault = "is not a setting: write key=value, for example rounds=5"
    elif parsed.keys() != {"value"}:
        fault = "is more than one setting: give each its own --set"
    if fault:
        raise SettingError(f"{quote_value(text)} {fault}")
    value = parsed["value"]
    if isinstance(value, datetime.date | datetime.time):
        # The user may mean a bare name such as 2024-01-01
        value = raw.strip()
    return key.strip(), value
