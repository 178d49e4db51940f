"""``simulate`` and ``resume``: one run."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.cli.options import (
    RUN,
    ChangesOption,
    ConfigOption,
    Engine,
    EngineOption,
    ExperimentArgument,
    FileOption,
    NameOption,
    OutOption,
    RayAddressOption,
    RunDirArgument,
    SeedOption,
    SupernodesOption,
    TrackOption,
    example,
)


def add_commands(app: typer.Typer) -> None:
    """Add ``simulate`` and ``resume``."""
    app.command(
        "simulate",
        help="run an experiment of simulation.yaml",
        epilog=example("simulate uefl-digits --engine inline --set rounds=5"),
        rich_help_panel=RUN,
    )(_simulate)
    app.command(
        "resume",
        help="go on with a run that was cut short",
        epilog=example("resume runs/uefl-digits"),
        rich_help_panel=RUN,
    )(_resume)


def _simulate(
    experiment: ExperimentArgument,
    *,
    changes: ChangesOption,
    config: ConfigOption = None,
    out: OutOption = None,
    file: FileOption = None,
    engine: EngineOption = "ray",
    ray_address: RayAddressOption = None,
    supernodes: SupernodesOption = None,
    seed: SeedOption = None,
    name: NameOption = None,
    track: TrackOption = None,
) -> None:
    from fedsilo.server_app.run.planning import RunSources, planned, start
    from fedsilo.server_app.studies.finish import finish_run

    sources = RunSources(file=file, config=config, changes=tuple(changes), out=out)
    overrides: dict[str, Value] = {}
    if seed is not None:
        overrides["seed"] = seed
    if name:
        overrides["run-name"] = name
    if track:
        overrides["track"] = track
    settings, resources = planned(experiment, sources, supernodes=supernodes, overrides=overrides)
    start(settings, resources, engine, ray_address, finish_run)


def _resume(
    run_dir: RunDirArgument,
    *,
    engine: Annotated[Engine | None, typer.Option("--engine", help="default: as before")] = None,
    supernodes: Annotated[
        int | None, typer.Option("--supernodes", help="simulated sites (default: as before)")
    ] = None,
    ray_address: RayAddressOption = None,
    track: TrackOption = None,
) -> None:
    from fedsilo.server_app.run.planning import replanned, start
    from fedsilo.server_app.studies.finish import finish_run

    settings, resources, engine_before = replanned(run_dir, supernodes=supernodes, track=track)
    start(settings, resources, engine or engine_before, ray_address, finish_run)
