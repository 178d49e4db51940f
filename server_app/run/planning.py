"""From a command's options to settings and resources, and from those to an engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.datasets.registry import cut_of, silo_names
from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.one_line import one_line, shown
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, keys_with
from fedsilo.server_app.config.experiments import find_experiment, simulation_file
from fedsilo.server_app.config.old_keys import overlaid
from fedsilo.server_app.config.settings import (
    RunSettings,
    launch_values,
    parse_assignment,
    read_toml,
    resolve,
    run_values,
)
from fedsilo.server_app.records.run_directory import RunDirectory, named, open_run_directory
from fedsilo.server_app.run.ray_engine import check_resources, run_with_ray

if TYPE_CHECKING:
    from fedsilo.server_app.run.runner import Draw

_PATHS = (*keys_with(CommonSettings, "files"), "out")


@dataclass(frozen=True, kw_only=True)
class RunSources:
    """Where a run's settings come from.

    Attributes:
        file: the simulation file; None: the usual one.
        config: a TOML file of settings over the experiment's.
        changes: settings over both, each ``key=value``.
        out: folder of run directories; None: the settings' own, else ``runs``.
    """

    file: Path | None = None
    config: Path | None = None
    changes: tuple[str, ...] = ()
    out: Path | None = None


def planned(
    experiment: str,
    sources: RunSources,
    *,
    supernodes: int | None = None,
    overrides: Mapping[str, Value] | None = None,
) -> tuple[RunSettings, Mapping[str, Value]]:
    """Return settings and resources of a run: experiment, file, changes, then ``overrides``.

    Args:
        experiment: its name in the simulation file.
        sources: where its settings come from.
        supernodes: simulated sites; None: the experiment's, else all silos.
        overrides: settings over all others, by key.

    Raises:
        SettingError: anything about them is wrong.
    """
    declared = find_experiment(simulation_file(sources.file), experiment)
    settings = named(
        resolve(_with_paths(_merged(declared.values, sources, overrides or {}), sources))
    )
    resources = {"num-supernodes": len(silo_names(settings.common)), **declared.resources}
    if supernodes is not None:
        resources["num-supernodes"] = supernodes
    return settings, check_resources(resources)


def _merged(
    declared: Mapping[str, Value], sources: RunSources, overrides: Mapping[str, Value]
) -> dict[str, Value]:
    of_file = read_toml(sources.config) if sources.config else {}
    changes = dict(parse_assignment(text) for text in sources.changes)
    values, lines = overlaid(declared, of_file, changes, overrides)
    for line in lines:
        print(f"fedsilo: {line}", file=sys.stderr)
    return values


def _with_paths(values: Mapping[str, Value], sources: RunSources) -> dict[str, Value]:
    """Return the values with the folder of runs, and every path absolute."""
    placed = dict(values)
    if sources.out or not (placed.get("out") or os.environ.get("FEDSILO_RUNS")):
        placed["out"] = str(sources.out or "runs")
    for key in _PATHS:
        path = placed.get(key)
        if path and isinstance(path, str):
            placed[key] = _absolute(key, path)
    return placed


def _absolute(key: str, path: str) -> str:
    try:
        return str(Path(path).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a null byte, nobody's home, a loop
        reason = one_line(error, 100)
        raise SettingError(f"setting '{key}' is {shown(path)}, no path here: {reason}") from None


def replanned(
    run_dir: Path, *, supernodes: int | None = None, track: str | None = None
) -> tuple[RunSettings, Mapping[str, Value], str]:
    """Return settings, resources and engine with which a run goes on that was cut short.

    Args:
        run_dir: its run directory.
        supernodes: simulated sites; None: as before.
        track: where metrics also go; None: as before.

    Raises:
        FedsiloError: there is no run, or its files cannot be used.
    """
    directory = RunDirectory(run_dir.resolve())
    config = directory.path / "config.toml"
    if not config.is_file():
        raise RunDirectoryError(
            f"{directory.path} has no config.toml: it is no run directory, or "
            "its run never began; start it anew"
        )
    launch = launch_values(config)
    values = run_values(config) | {
        "resume": True,
        "out": str(directory.path.parent),
        "run-name": directory.path.name,
        **({"track": track} if track else {}),
    }
    resources = dict(launch.get("resources", {}))
    resources.setdefault("num-supernodes", len(directory.read_json("silos.json")))
    if supernodes is not None:
        resources["num-supernodes"] = supernodes
    settings = resolve(values)
    return settings, check_resources(resources), str(launch.get("engine", "ray"))


def start(
    settings: RunSettings,
    resources: Mapping[str, Value],
    engine: str,
    ray_address: str | None = None,
    draw: Draw | None = None,
) -> RunDirectory:
    """Run settings on an engine, and return the run directory.

    Args:
        settings: the run's.
        resources: simulated sites, and what each may take.
        engine: ``ray`` or ``inline``.
        ray_address: a Ray cluster that runs, ``auto`` or ``HOST:PORT``; None: one of the run's own.
        draw: draws the pictures of a run in this process; by Ray the app of the run does.

    Raises:
        FedsiloError: the run failed.
    """
    if settings.common.purpose != "train":
        raise SettingError("setting 'purpose' is 'survey': 'fedsilo survey' asks for that")
    # Told here and now, not from inside a Flower run
    open_run_directory(settings.common.out, settings.common.run_name, settings.common.resume)
    cut_of(settings.common)  # one that leaves a silo empty, by every silo's word otherwise
    if engine == "ray":
        return run_with_ray(settings, resources, ray_address or "")
    if ray_address:
        raise SettingError("--ray-address is of the engine 'ray': leave it or --engine inline out")
    from fedsilo.server_app.run.inline_engine import run_inline

    return run_inline(settings, int(resources["num-supernodes"]), draw)
