"""Turns a command's options into settings and resources, and starts the run on an engine."""

import os
from collections.abc import Mapping
from pathlib import Path

from fedsilo.core import plugins
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import RunDirectoryError, SettingError
from fedsilo.core.one_line import format_count, one_line, quote_value
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, keys_with
from fedsilo.datasets.registry import DATA_SETS, data_set, load_silo, plugin_modules, silo_names
from fedsilo.engines.experiments import Experiment, declared_experiment
from fedsilo.engines.inline_engine import run_inline
from fedsilo.engines.process_engine import run_with_processes, start_fork_server
from fedsilo.engines.ray_engine import run_with_ray
from fedsilo.models.maths.pacing import steps_of_round
from fedsilo.server_app.config import settings as run_settings
from fedsilo.server_app.config.resources import check_resources, cores, has_gpu, worker_environments
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.config.trusted_plugins import approve_plugins, name_plugins
from fedsilo.server_app.records import run_directory
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.checks import PLAN_CHECKS, Plan, raise_first

_FEW_STEPS = 20_000  # a step on a table takes about 1 ms, so starting processes gains little
_PATHS = (*keys_with(CommonSettings, "files"), "run.out")


def plan_run(
    experiment: str,
    sources: RunSources,
    *,
    supernodes: int | None = None,
    overrides: Mapping[str, Value] | None = None,
    engine: str = "",
) -> tuple[RunSettings, Mapping[str, Value]]:
    """Build the settings and the resources of a run of simulated sites.

    A later source overrides an earlier one: the experiment, ``sources.config``, ``sources.changes``
    and ``overrides``. ``supernodes`` None means the experiment's number of sites or, without one,
    the data set's.

    Raises:
        SettingError: a source cannot be read, or a setting is wrong.
        DataError: the data set's silos cannot be listed.
    """
    declared = declared_experiment(experiment, sources)
    settings = _settings_over(declared, sources, overrides)
    _start_forks_early(settings.common, engine)
    # The experiment's own number of sites takes precedence over the number of silos
    resources = {"num-supernodes": len(silo_names(settings.common)), **declared.resources}
    if supernodes is not None:
        resources["num-supernodes"] = supernodes
    return settings, check_resources(resources)


def planned_settings(
    experiment: str, sources: RunSources, overrides: Mapping[str, Value] | None = None
) -> RunSettings:
    """Build only the settings of a run, which needs no data on this machine, unlike ``plan_run``.

    A later source overrides an earlier one: the experiment, the TOML file ``sources.config``,
    ``sources.changes``, and ``overrides``.

    Raises:
        SettingError: a source cannot be read, or a setting is wrong.
    """
    declared = declared_experiment(experiment, sources)
    return _settings_over(declared, sources, overrides)


def _settings_over(
    declared: Experiment, sources: RunSources, overrides: Mapping[str, Value] | None
) -> RunSettings:
    """Build the settings of a run from its experiment and from sources that override it.

    A later source overrides an earlier one: ``declared``, the file ``sources.config``,
    ``sources.changes`` and ``overrides``. In the result, paths are absolute and the run has a name.
    """
    named_here = dict(run_settings.parse_assignment(text) for text in sources.changes)
    named_here.update(overrides or {})
    values = dict(declared.values)
    if sources.config:
        values.update(_read_settings(sources.config, named_here))
    values.update(named_here)
    # Paths first: a Flower app runs in another working folder, where relative ones would be lost
    settings = run_settings.resolve(_with_paths(values, sources))
    return run_directory.with_run_name(settings).pin_plugins()


def _read_settings(path: Path, named_here: Mapping[str, Value]) -> dict[str, Value]:
    """Read a TOML file of settings, and check that the plugins it uses may be executed.

    Keys in ``named_here`` are left out, because they override the file. A plugin is trusted if
    ``named_here`` names it. Any other one needs approval.
    """
    values = run_settings.read_toml(path)
    # Before the check, because a plugin that the command replaces needs no approval
    for key in values.keys() & named_here.keys():
        del values[key]
    # A plugin that the user names in this command is trusted, also if the file names it too
    name_plugins(plugins.plugin_entries(str(named_here.get("plugin", ""))))
    placed = _with_plugins(values)
    with plugins.without_working_folder():
        return approve_plugins(placed, plugin_modules(placed), needs_pins=False)


def _with_paths(values: Mapping[str, Value], sources: RunSources) -> dict[str, Value]:
    """Return the settings with absolute paths of files, folders and plugins, and with 'run.out'.

    'run.out' is ``sources.out`` or, without it, the value in ``values``. If both are missing, it is
    ``runs``, or empty if $FEDSILO_RUNS is set.
    """
    placed = dict(values)
    if sources.out or not (placed.get("run.out") or os.environ.get("FEDSILO_RUNS")):
        placed["run.out"] = str(sources.out or "runs")
    for key in _PATHS:
        path = placed.get(key)
        if path and isinstance(path, str):
            placed[key] = _absolute_path(key, path)
    return _with_plugins(placed)


def _with_plugins(values: dict[str, Value]) -> dict[str, Value]:
    """Move the plugin files that settings name to the setting 'plugin', as absolute paths.

    For example, 'nets.py:build' in 'network.name' becomes 'nets:build', and nets.py is added to
    'plugin'. ``values`` is changed in place and returned.
    """
    entries = plugins.plugin_entries(str(values.get("plugin", "")))
    for key in ("network.name", "method", "dataset", "split.partition"):
        file, _, rest = str(values.get(key, "")).partition(":")
        if file.endswith(".py"):
            entries.append(file)
            values[key] = f"{plugins.module_of(file)}:{rest}".rstrip(":")
    places = []  # each once: several settings may name the same file
    for entry in entries:
        place = entry
        if entry.endswith(".py"):
            place = _absolute_path("plugin", entry)
        if place not in places:
            places.append(place)
    if places:
        values["plugin"] = ", ".join(places)
    return values


def _absolute_path(key: str, path: str) -> str:
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a null byte, no home, a loop
        reason = one_line(error, 100)
        raise SettingError(
            f"setting '{key}' must be a path of this machine, but is {quote_value(path)}: {reason}"
        ) from None


def plan_resumed_run(
    run_dir: Path, *, supernodes: int | None = None, track: str | None = None
) -> tuple[RunSettings, Mapping[str, Value], str]:
    """Build the settings, resources and engine to resume an interrupted run.

    The settings are those in the directory's config.toml, at the directory's present place.
    ``supernodes`` and ``track`` replace the recorded values unless they are None. The engine is
    "ray" if config.toml names none.

    Raises:
        FedsiloError: ``run_dir`` holds no run, or its files cannot be used.
    """
    path = run_dir.resolve()
    if not (path / run_directory.CONFIG).is_file():
        raise RunDirectoryError(
            f"{path} has no {run_directory.CONFIG}: it is not a run directory, or its run never "
            "began; start a new run"
        )
    before = run_settings.read_run_config(path / run_directory.CONFIG)
    # The directory may have been moved or renamed since the run began, so its present place counts
    values = dict(before.settings)
    values.update({"run.resume": True, "run.out": str(path.parent), "run.name": path.name})
    if track:
        values["run.track"] = track
    resources = {"num-supernodes": len(RunDirectory(path).read_json(run_directory.SILOS))}
    resources.update(before.launch.get("resources", {}))
    if supernodes is not None:
        resources["num-supernodes"] = supernodes
    settings = run_settings.resolve_recorded(values)
    return settings, check_resources(resources), str(before.launch.get("engine", "ray"))


def _start_forks_early(common: CommonSettings, engine: str) -> None:
    """Start the server that forks worker processes now if the run may need it, to save time.

    It is started for "processes". It is also started for "auto" with several cores, unless the data
    are a table or sites train as one batch.
    """
    is_table = ".tables." in DATA_SETS.get(
        common.dataset, ""
    )  # the name is enough: its module needs PyTorch
    if engine == "processes" or (
        engine == "auto" and cores() > 1 and not is_table and common.vectorised <= 1
    ):
        start_fork_server()


def engine_for(
    common: CommonSettings, resources: Mapping[str, Value], engine: str, ray_address: str | None
) -> str:
    """Choose a run's engine: ``engine`` itself or, for "auto", the one that is probably fastest.

    "auto" means "ray" with a Ray address. Otherwise it means "inline" if sites train as one batch,
    only one worker process fits, a table needs few steps, or sites have no share of a usable GPU.
    In all other cases it is "processes".
    """
    if engine != "auto":
        return engine
    if ray_address:
        return "ray"
    if common.vectorised > 1:
        print(f"fedsilo: up to {common.vectorised} sites train as one batch in this process")
        return "inline"
    workers = len(worker_environments(resources))
    reason = _why_inline(common, resources, workers)
    if reason:
        hint = ""
        if workers > 1:
            hint = " (to train side by side: --engine processes)"
        print(f"fedsilo: all sites train in this process, because {reason}{hint}")
        return "inline"
    print(
        f"fedsilo: sites train side by side in {workers} processes (to use only this one: "
        "--engine inline)"
    )
    return "processes"


def _why_inline(common: CommonSettings, resources: Mapping[str, Value], workers: int) -> str:
    """Explain why a run should train all sites in this process, or return an empty text.

    The reason is a single worker process, few steps on a table, or a GPU of which worker processes
    have no share. Otherwise, several processes are better.
    """
    if workers == 1:
        return "the cores, memory, GPUs or sites allow no second process"
    if data_set(common.dataset).is_table:
        steps = estimate_steps(common)
        if steps < _FEW_STEPS:
            what = format_count(steps, "step")
            return f"starting more processes takes longer than {what} on tables"
    # Workers without a share of the GPU compute on the CPU, but this process on the GPU
    if common.device == "cpu" or resources["client-resources-num-gpus"] or not has_gpu():
        return ""
    return "the sites have no share of the GPU"


def estimate_steps(common: CommonSettings) -> int:
    """Estimate the optimiser steps of all sites in all rounds.

    Every site is assumed to have as many training samples as the first one. The estimate is 0 if
    the data set has no sites.
    """
    names = silo_names(common)
    samples = 0
    if names:
        samples = len(load_silo(names[0], common).train)
    return common.rounds * len(names) * steps_of_round(common, samples)


def start(
    settings: RunSettings,
    resources: Mapping[str, Value],
    engine: str,
    ray_address: str | None = None,
) -> RunDirectory:
    """Check that a run can begin, carry it out on an engine, and return the run directory.

    ``resources`` are those that ``check_resources`` returns. ``engine`` is "inline", "processes",
    "ray" or "auto". ``ray_address`` is that of a running cluster, None without one.

    Raises:
        FedsiloError: the run cannot begin, for example because its directory exists, or it failed.
    """
    common = settings.common
    # Checked here, because an error from inside a Flower run comes late and is harder to read
    run_directory.open_run_directory(common.out, common.run_name, common.resume)
    raise_first(PLAN_CHECKS, Plan(common, resources, engine, ray_address or ""))
    chosen = engine_for(common, resources, engine, ray_address)
    if chosen == "ray":
        return run_with_ray(settings, resources, ray_address or "")
    if chosen == "processes":
        return run_with_processes(settings, resources)
    return run_inline(settings, int(resources["num-supernodes"]))
