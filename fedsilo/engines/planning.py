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

    Settings come from four sources, and a later source overrides an earlier one: the experiment,
    ``sources.config``, ``sources.changes`` and ``overrides``. If the run may use worker processes,
    the server that forks them is started here, because it needs time to load PyTorch.

    Args:
        experiment: the name of an experiment. The name of a method means that method with defaults.
        sources: the files and changes that the command names.
        supernodes: the number of simulated sites. None for the number in the experiment or, if it
            has none, the number of the data set's silos.
        overrides: settings that the command itself sets, key -> value.
        engine: the engine that will run it, or empty if it is unknown.

    Returns:
        The settings, and the resources: the number of sites and their shares of cores and GPUs.

    Raises:
        SettingError: a source cannot be read, or a setting or resource is wrong.
        DataError: the data set's silos cannot be listed, for example because its folder is missing.
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

    A later source overrides an earlier one: the experiment ``declared``, the TOML file
    ``sources.config``, ``sources.changes``, and ``overrides``. In the result, paths are absolute, a
    missing name of the run has been generated, and the digests of plugins are recorded.

    Raises:
        SettingError: a source cannot be read, or a setting is wrong.
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

    The file may be the config.toml of somebody else's run, so naming a plugin in it does not make
    the plugin trusted. The user trusts a plugin that ``named_here`` names, that the user has run
    before, or that an installed package offers.

    Args:
        path: the file.
        named_here: settings from the command line or from Python, which override the file. Their
            keys are left out of the result, except 'plugin'. Plugins that ``named_here`` lists
            under 'plugin' stay trusted until this process ends.

    Returns:
        The file's settings, key -> value. 'plugin' lists only trusted plugin files.

    Raises:
        SettingError: the file cannot be read, or it uses a plugin that is not trusted.
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

    Relative paths start from the working folder. 'run.out' is the folder of run directories. The
    first rule that applies decides on it:

    - The option --out (``sources.out``) replaces it.
    - A value in ``values`` is kept.
    - It stays empty if the variable $FEDSILO_RUNS is set.
    - Otherwise it is ``runs``.
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

    A plugin is a Python file that the user wrote. For example, the value 'nets.py:build' of
    'network.name' becomes 'nets:build', and the path of nets.py is added to 'plugin'. The same is
    done for 'method', 'dataset' and 'split.partition'. The files that were in 'plugin' before come
    first. Each file is listed once.

    Args:
        values: the settings, which are changed in place and returned.
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

    The settings are those in the directory's config.toml, with 'run.resume' set. 'run.out' and
    'run.name' are set to the directory's present place, because it may have been moved.

    Args:
        run_dir: the run directory.
        supernodes: the number of simulated sites. None for the number that the run had before.
        track: the setting 'run.track'. None or empty for the value that it had before.

    Returns:
        The settings, the resources and the engine, which is "ray" if config.toml names none.

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
    """Start the fork server now if the run may use worker processes, to save time later.

    The fork server creates the worker processes. It loads PyTorch while this process continues. The
    engine decides:

    - With "processes", the server is started.
    - With "auto", it is started if this process may use several cores, the data set is not a table,
      and 'machine.vectorised' is at most 1.
    - With any other engine, nothing is started.
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

    With "auto", the first rule that applies decides:

    - "ray" with a Ray address
    - "inline" with 'machine.vectorised' above 1
    - "inline" if this machine has room for only one worker process
    - "inline" for fewer than 20,000 steps on a table
    - "inline" if this process can use a GPU of which ``resources`` give the sites no share
    - "processes" otherwise

    If "auto" chooses "inline" or "processes", the choice is printed with its reason.
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

    The text is to follow the word "because". An empty text means that several processes are better.
    The first of these reasons that applies is returned:

    - ``workers`` is 1.
    - The data are a table, and the run has fewer than 20,000 steps.
    - This process can use a GPU, but the resources give worker processes no share of it.

    Args:
        common: the run's common settings.
        resources: the shares of cores and GPUs, as ``check_resources`` returns them.
        workers: the number of worker processes for which this machine has room.
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

    Args:
        settings: the settings of the run.
        resources: the number of sites and their shares of cores and GPUs, with all keys that
            ``check_resources`` returns.
        engine: "inline", "processes", "ray" or "auto". ``engine_for`` has the rules of "auto".
        ray_address: the address of a running Ray cluster, ``auto`` or ``HOST:PORT``. None without
            one.

    Raises:
        FedsiloError: the run cannot begin, for example because its directory exists already, or it
            failed.
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
