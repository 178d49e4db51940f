"""From a command's options to settings and resources, and on to an engine."""

import os
from collections.abc import Mapping
from pathlib import Path

from fedsilo.datasets.registry import (
    DATA_SETS,
    data_set,
    load_silo,
    plugin_modules,
    silo_names,
)
from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.one_line import counted, one_line, shown
from fedsilo.models.contract.plugs import (
    module_of,
    plugin_entries,
    without_working_folder,
)
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, keys_with
from fedsilo.models.maths.pacing import steps_of_round
from fedsilo.server_app.config.experiments import find_experiment, simulation_file
from fedsilo.server_app.config.resources import (
    check_resources,
    cores,
    has_gpu,
    worker_environments,
)
from fedsilo.server_app.config.settings import (
    RunSettings,
    parse_assignment,
    read_run_config,
    read_toml,
    resolve,
    resolve_recorded,
)
from fedsilo.server_app.config.trusted_plugins import approve_plugins, name_plugins
from fedsilo.server_app.records.run_directory import (
    CONFIG,
    SILOS,
    RunDirectory,
    named,
    open_run_directory,
)
from fedsilo.server_app.run.arguments import RunSources
from fedsilo.server_app.run.inline_engine import refuse_vectorised, run_inline
from fedsilo.server_app.run.process_engine import run_with_processes, start_fork_server
from fedsilo.server_app.run.ray_engine import run_with_ray
from fedsilo.server_app.run.ready import (
    refuse_by_first_silo,
    refuse_little_memory,
    refuse_without_a_silo,
)

_FEW_STEPS = 20_000  # of tables, some 1 ms each: below, starting processes gains little
_PATHS = (*keys_with(CommonSettings, "files"), "out")


def planned(
    experiment: str,
    sources: RunSources,
    *,
    supernodes: int | None = None,
    overrides: Mapping[str, Value] | None = None,
    engine: str = "",
) -> tuple[RunSettings, Mapping[str, Value]]:
    """Return settings and resources of a run: experiment, file, changes, then ``overrides``.

    ``supernodes`` are the simulated sites, by default the experiment's or all silos; ``engine`` is
    what the run will be started on, if it is known.

    Raises:
        SettingError: a source cannot be read, or a setting or resource is wrong.
    """
    settings = planned_settings(experiment, sources, overrides)
    _prepare(settings.common, engine)
    declared = find_experiment(simulation_file(sources.file), experiment).resources
    resources = {"num-supernodes": len(silo_names(settings.common)), **declared}
    if supernodes is not None:
        resources["num-supernodes"] = supernodes
    return settings, check_resources(resources)


def planned_settings(
    experiment: str, sources: RunSources, overrides: Mapping[str, Value] | None = None
) -> RunSettings:
    """Return the settings of ``planned``, for sites that are elsewhere: no data are needed here."""
    declared = find_experiment(simulation_file(sources.file), experiment).values
    named_here = dict(parse_assignment(text) for text in sources.changes)
    named_here.update(overrides or {})
    of_file = _read_settings(sources.config, named_here) if sources.config else {}
    values = {**declared, **of_file, **named_here}
    return named(resolve(_with_paths(values, sources))).pinned()


def _read_settings(path: Path, named_here: Mapping[str, Value]) -> dict[str, Value]:
    """Read a TOML file of settings, without plugins that only the file names.

    The file may be the config.toml of somebody else's run. What the user gave on the command line
    or in Python, ``named_here``, is left out, as it replaces the file's.

    Raises:
        SettingError: the file cannot be read, or a plugin may not be executed.
    """
    values = {key: value for key, value in read_toml(path).items() if key not in named_here}
    name_plugins(plugin_entries(str(named_here.get("plugin", ""))))
    placed = _with_plugins(values)
    with without_working_folder():
        return approve_plugins(placed, plugin_modules(placed), needs_pins=False)


def _with_paths(values: Mapping[str, Value], sources: RunSources) -> dict[str, Value]:
    """Return the values with the folder of runs, and every path absolute."""
    placed = dict(values)
    if sources.out or not (placed.get("out") or os.environ.get("FEDSILO_RUNS")):
        placed["out"] = str(sources.out or "runs")
    for key in _PATHS:
        path = placed.get(key)
        if path and isinstance(path, str):
            placed[key] = _absolute(key, path)
    return _with_plugins(placed)


def _with_plugins(values: dict[str, Value]) -> dict[str, Value]:
    """Return the values with the files of plugs in 'plugin', absolute, and their modules' names.

    ``network`` 'nets.py:build' becomes 'nets:build', and nets.py a file of 'plugin'.
    """
    entries = plugin_entries(str(values.get("plugin", "")))
    for key in ("network", "method", "dataset", "partition"):
        file, _, rest = str(values.get(key, "")).partition(":")
        if file.endswith(".py"):
            entries.append(file)
            values[key] = f"{module_of(file)}:{rest}".rstrip(":")
    paths = [_absolute("plugin", e) if e.endswith(".py") else e for e in entries]
    return values | ({"plugin": ", ".join(dict.fromkeys(paths))} if paths else {})


def _absolute(key: str, path: str) -> str:
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a null byte, no home, a loop
        reason = one_line(error, 100)
        raise SettingError(f"setting '{key}' is {shown(path)}, no path here: {reason}") from None


def replanned(
    run_dir: Path, *, supernodes: int | None = None, track: str | None = None
) -> tuple[RunSettings, Mapping[str, Value], str]:
    """Return settings, resources and engine to resume an interrupted run, by default as before.

    Raises:
        FedsiloError: there is no run, or its files cannot be used.
    """
    path = run_dir.resolve()
    if not (path / CONFIG).is_file():
        raise RunDirectoryError(
            f"{path} has no {CONFIG}: it is not a run directory, or its run never began; start it "
            "again"
        )
    before = read_run_config(path / CONFIG)
    values = before.settings | {"resume": True, "out": str(path.parent), "run-name": path.name}
    values |= {"track": track} if track else {}
    resources = {"num-supernodes": len(RunDirectory(path).read_json(SILOS))}
    resources |= before.launch.get("resources", {})
    resources |= {} if supernodes is None else {"num-supernodes": supernodes}
    settings = resolve_recorded(values)
    return settings, check_resources(resources), str(before.launch.get("engine", "ray"))


def _prepare(common: CommonSettings, engine: str) -> None:
    """Let a fork server load PyTorch while this process does, where the run may need it."""
    is_table = ".tables." in DATA_SETS.get(common.dataset, "")  # by name: its module needs PyTorch
    if engine == "processes" or (
        engine == "auto" and cores() > 1 and not is_table and common.vectorised == 1
    ):
        start_fork_server()


def engine_for(
    common: CommonSettings, resources: Mapping[str, Value], engine: str, ray_address: str | None
) -> str:
    """Return the engine of that name; ``auto`` takes what is quicker here, and says so.

    Several processes are, unless there is but one core, one GPU that sites are given no share of,
    or so little to train that starting processes takes longer (docs/engines.md).
    """
    if engine != "auto" or ray_address:
        return "ray" if engine == "auto" else engine
    if common.vectorised > 1:
        print(f"fedsilo: up to {common.vectorised} sites train as one in this process")
        return "inline"
    workers = len(worker_environments(resources))
    if reason := _why_inline(common, resources, workers):
        hint = " (--engine processes: side by side)" if workers > 1 else ""
        print(f"fedsilo: sites train one after another in this process, as {reason}{hint}")
        return "inline"
    print(
        f"fedsilo: sites train in {workers} processes side by side (--engine inline: in this one)"
    )
    return "processes"


def _why_inline(common: CommonSettings, resources: Mapping[str, Value], workers: int) -> str:
    """Return why a run is quicker in one process, or an empty text if it is not."""
    if workers == 1:
        return "cores, memory, GPUs and sites allow no second one"
    if data_set(common.dataset).is_table and (steps := _steps(common)) < _FEW_STEPS:
        return f"{counted(steps, 'step')} of tables: starting others takes longer"
    if common.device == "cpu" or resources["client-resources-num-gpus"] or not has_gpu():
        return ""
    return "sites are given no share of the GPU"


def _steps(common: CommonSettings) -> int:
    """Return about how many steps a run takes, if the first site has as many samples as others."""
    names = silo_names(common)
    samples = len(load_silo(names[0], common).train) if names else 0
    return common.rounds * len(names) * steps_of_round(common, samples)


def start(
    settings: RunSettings,
    resources: Mapping[str, Value],
    engine: str,
    ray_address: str | None = None,
) -> RunDirectory:
    """Run settings on an engine, see ``engine_for``, and return the run directory.

    ``ray_address`` is that of a running cluster, ``auto`` or ``HOST:PORT``.

    Raises:
        FedsiloError: the run failed.
    """
    if settings.common.purpose != "train":
        raise SettingError(
            f"setting 'purpose' is '{settings.common.purpose}', which is not a run: remove it, or "
            "run 'fedsilo survey'"
        )
    # Refused here and now, not from inside a Flower run
    open_run_directory(settings.common.out, settings.common.run_name, settings.common.resume)
    refuse_without_a_silo(settings.common)
    chosen = engine_for(settings.common, resources, engine, ray_address)
    refuse_vectorised(settings.common, chosen)
    if chosen == "ray":
        refuse_by_first_silo(settings.common)
        if not ray_address:
            refuse_little_memory(resources)
        return run_with_ray(settings, resources, ray_address or "")
    if ray_address:
        raise SettingError(
            f"--ray-address belongs to the engine 'ray': remove it or --engine {chosen}"
        )
    if chosen == "processes":
        return run_with_processes(settings, resources)
    return run_inline(settings, int(resources["num-supernodes"]))
