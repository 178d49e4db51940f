"""From a command's options to settings and resources, and from those to an engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from datasets.registry import silo_names
from models.contract.settings_schema import Value
from server_app.config.experiments import SIMULATION_FILE, find_experiment
from server_app.config.settings import RunSettings, parse_assignment, read_toml, resolve
from server_app.records.run_directory import named, open_run_directory
from server_app.run.ray_engine import check_resources, run_with_ray

_PATHS = ("data-dir", "cache-dir", "out")


def simulation_file(given: Path | None) -> Path:
    """Return the simulation file: the given one, else the working folder's, else fedsilo's own."""
    here = Path(SIMULATION_FILE)
    if given is not None or here.is_file():
        return given or here
    return Path(__file__).resolve().parents[2] / SIMULATION_FILE


def planned(
    experiment: str, options: argparse.Namespace, **more: Value
) -> tuple[RunSettings, Mapping[str, Value]]:
    """Return settings and resources of a run: experiment, then file, then ``--set``, then more.

    Raises:
        SettingError: anything about them is wrong.
    """
    found = find_experiment(simulation_file(options.file), experiment)
    values = dict(found.values)
    if options.config:
        values |= read_toml(options.config)
    values |= dict(parse_assignment(text) for text in options.changes)
    values |= more
    if options.out or not (values.get("out") or os.environ.get("FEDSILO_RUNS")):
        values["out"] = str(options.out or "runs")
    for key in _PATHS:
        path = values.get(key)
        if path and isinstance(path, str):
            values[key] = str(Path(path).expanduser().resolve())
    settings = named(resolve(values))
    resources = {"num-supernodes": len(silo_names(settings.common)), **found.resources}
    if options.supernodes is not None:
        resources["num-supernodes"] = options.supernodes
    return settings, check_resources(resources)


def start(settings: RunSettings, resources: Mapping[str, Value], engine: str) -> None:
    """Run settings on an engine.

    Raises:
        FedsiloError: the run failed.
    """
    # Told here and now, not from inside a Flower run
    open_run_directory(settings.common.out, settings.common.run_name, settings.common.resume)
    if engine == "ray":
        run_with_ray(settings, resources)
    else:
        from server_app.run.inline_engine import run_inline

        run_inline(settings, int(resources["num-supernodes"]))
