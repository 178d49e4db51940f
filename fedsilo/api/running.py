"""Starts, resumes and watches one run or regression; makes projects, pretrains backbones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api import options
from fedsilo.core.arguments import (
    AnyPath,
    AnyRun,
    Tell,
    folder_of,
    folders_of,
    path_of,
    plugin_texts,
    refuse_target,
    several,
    silent,
    texts_of,
)
from fedsilo.core.errors import RunDirectoryError, SettingError
from fedsilo.core.one_line import as_word
from fedsilo.core.settings_schema import Value
from fedsilo.runs.finished_run import FinishedRun, load_run
from fedsilo.server_app.config.trusted_plugins import name_plugins

if TYPE_CHECKING:
    from fedsilo.reports.regression import Regression
    from fedsilo.reports.watch.run_list import ListedRun
    from fedsilo.reports.watch.view import View
    from fedsilo.server_app.records.run_directory import RunDirectory


@options.command
def new(project: Annotated[AnyPath, "the folder to create"]) -> Iterator[str]:
    """Make a folder for the user's own experiments.

    The folder gets a simulation file, an example of a network, and a README with commands. It may
    exist already if it is empty.

    Yields:
        The path of each file in the folder, then the command to run next.

    Raises:
        RunDirectoryError: the folder has files in it, or is a file.
    """
    folder = Path(project)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirectoryError(f"{folder} already has files in it: choose another name")
    # The template is in the package, where importing it may have left compiled files
    made = Path(__file__).with_name("project")
    copytree(made, folder, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for path in sorted(folder.iterdir()):
        yield str(path)
    yield f"next:  cd {as_word(folder)} && fedsilo simulate first"


@options.command
def simulate(
    experiment: options.ExperimentName,
    *,
    silos: object = None,
    label: str = "label",
    missing: str = "drop",
    network: object = None,
    engine: Annotated[
        options.Engine, options.Option(options.ENGINE_HELP, default="auto")
    ] = "inline",
    ray_address: options.RayAddress = None,
    supernodes: options.Supernodes = None,
    seed: options.Seed = None,
    name: options.RunName = None,
    track: options.Tracker = None,
    no_pictures: Annotated[bool, "do not draw pictures at the end"] = False,
    **sources: Unpack[options.Sources],
) -> FinishedRun:
    """Run an experiment, or a method with its default settings, on simulated sites.

    ``silos`` has the caller's own data: site -> a frame, a pair (X, y) or a ``Dataset``. None uses
    the experiment's data. ``label`` is their column of labels. ``missing`` is 'drop' or 'impute',
    for missing values. ``network`` is a name or a function.

    Returns:
        The finished run.

    Raises:
        FedsiloError: an argument cannot be used, or the run failed.
    """
    from fedsilo.engines.planning import plan_run, start
    from fedsilo.server_app.records.run_directory import free_name

    overrides = _overrides(seed, name, track)
    overrides |= {"network.name": _network_name(network)} if network is not None else {}
    # Written before the run is planned, because planning reads the names of the silos
    if silos is not None:
        overrides |= _write_silos(silos, label, missing, sources)
    settings, resources = plan_run(
        experiment,
        options.run_sources(sources),
        supernodes=supernodes,
        overrides=overrides,
        engine=engine,
    )
    with free_name(settings) as named:
        directory = start(named, resources, engine, ray_address)
    return _finish(directory, draw=not no_pictures)


def _overrides(seed: int | None, name: str | None, track: str | None) -> dict[str, Value]:
    """Collect the settings for which a command has separate options: key -> value.

    These are 'seed', 'run.name' and 'run.track'. An option that is None or empty is left out. The
    result overrides all settings from the experiment, from a settings file and from --set.
    """
    given: dict[str, Value | None] = {"seed": seed, "run.name": name, "run.track": track}
    overrides: dict[str, Value] = {}
    for key, value in given.items():
        if value not in (None, ""):
            overrides[key] = value
    return overrides


def plan_simulation(
    experiment: str,
    *,
    engine: str = "auto",
    supernodes: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    track: str | None = None,
    **sources: Unpack[options.Sources],
) -> Iterator[str]:
    """Yield the lines of ``simulate --dry-run``: a run's plan, its estimated cost and its folder.

    The arguments are those of ``simulate``. Nothing is run or written.

    Raises:
        FedsiloError: the run could not begin, for example because its directory exists already.
    """
    from fedsilo.engines.dry_run import NOTHING_RUN, describe_run
    from fedsilo.engines.planning import plan_run
    from fedsilo.server_app.records.run_directory import free_name

    overrides = _overrides(seed, name, track)
    given = options.run_sources(sources)
    settings, resources = plan_run(experiment, given, supernodes=supernodes, overrides=overrides)
    with free_name(settings) as named:
        yield from describe_run(named, resources, engine)
    yield NOTHING_RUN


def _finish(directory: RunDirectory, *, draw: bool = True) -> FinishedRun:
    """Open a run that has just ended, draw its pictures, and compare it with a published paper.

    If a paper reports the method on these data, the metrics of both are printed. If the paper had
    other settings, the differences are printed instead.
    """
    from fedsilo.datasets.registry import shown_of
    from fedsilo.pictures.learning_curves import draw_pictures
    from fedsilo.runs.published.table import print_published
    from fedsilo.server_app.run.terminal import make_console, printer

    run, console = load_run(directory.path), make_console()
    if draw:
        draw_pictures(directory, printer(console))
    headline = shown_of(run.summary)
    print_published(run.shown().summary, run.paper, headline, console)
    return run


def _network_name(network: object) -> str:
    """Convert the argument ``network`` of ``simulate`` to the value of 'network.name'.

    A string is returned unchanged. A function or a class becomes 'MODULE:NAME'. It is refused if
    other processes could not import it, such as a lambda.
    """
    if isinstance(network, str):
        return network
    # "<" stands for a missing name; Python itself writes '<lambda>' and 'outer.<locals>.inner'
    module, name = (getattr(network, key, "<") for key in ("__module__", "__qualname__"))
    # Sites are other processes, which import a network by its module and its name
    if module == "__main__":
        raise SettingError(
            f"network '{name}' is defined in the running script, which sites cannot import: move "
            f"it to a module, or give network='SCRIPT:{name}' and plugin=__file__"
        )
    if "<" not in f"{module}{name}":
        return f"{module}:{name}"
    raise SettingError(
        "network must be a name, or a function or class of a module, because each site builds its "
        "own network: give the function that builds it"
    )


def _write_silos(
    silos: object, label: str, missing: str, sources: options.Sources
) -> dict[str, Value]:
    """Write the caller's own data as silos into the cache, so that runs can read them.

    ``sources`` may set the cache folder 'data.cache-dir'. The result has the settings 'dataset' and
    'data.dir', which read the data.
    """
    from fedsilo.api.own_silos import write_to_cache
    from fedsilo.core.files.locations import find_places
    from fedsilo.server_app.config.settings import parse_assignment

    # Only --set can name another cache here: the experiment is planned after its data are written
    given = dict(map(parse_assignment, texts_of(sources.get("settings"))))
    places = find_places("", str(given.get("data.cache-dir", "")))
    dataset, folder = write_to_cache(silos, label, missing, places.cache.resolve())
    return {"dataset": dataset, "data.dir": str(folder)}


@options.command
def resume(
    run_dir: options.RunDir,
    *,
    engine: Annotated[
        options.Engine | None, "processes, ray or inline (default: as before)"
    ] = None,
    supernodes: Annotated[int | None, "number of simulated sites (default: as before)"] = None,
    ray_address: options.RayAddress = None,
    track: options.Tracker = None,
    plugin: options.OwnPlugin = None,
) -> FinishedRun:
    """Continue an interrupted run.

    The run continues after its last checkpoint, with the settings in its run directory. Its
    results are bit-identical to those of a run without interruption.

    Returns:
        The finished run, opened for reading.

    Raises:
        FedsiloError: the directory has no run that can be continued, or the run failed.
    """
    from fedsilo.engines.planning import plan_resumed_run, start

    name_plugins(plugin_texts(plugin))
    settings, resources, before = plan_resumed_run(
        folder_of(run_dir), supernodes=supernodes, track=track
    )
    directory = start(settings, resources, engine or before, ray_address)
    return _finish(directory)


@options.command
def fit(
    family: Annotated[
        options.Family,
        "logistic (odds ratios), linear, poisson (rate ratios) or cox (hazard ratios)",
    ],
    *,
    dataset: Annotated[str | None, "the table (default: the settings' own)"] = None,
    outcome: Annotated[str, "the column that is explained (default: the table's label)"] = "",
    time: Annotated[
        str, "cox: the column with the time to the event or to censoring (default: the label's)"
    ] = "",
    event: Annotated[
        str, "cox: the column that is 1 for an event, 0 if censored (default: the table's label)"
    ] = "",
    ties: Annotated[options.Ties, "cox: how events at the same time count"] = "efron",
    columns: Annotated[str, "the columns that explain it, with commas between (default: all)"] = "",
    trust: Annotated[
        options.Trusted, "server: it sees each hospital's sums; sums: only those over all hospitals"
    ] = "server",
    deployment: options.OptionalDeployment = None,
    name: options.RunName = None,
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> Regression:
    """Fit a regression to the patients of all hospitals, without collecting their rows.

    Hospitals send sums over their patients. The sums give the same coefficients as the pooled rows.
    In a Cox regression, each hospital has its own baseline hazard.

    Returns:
        The regression. ``document`` has all numbers.

    Raises:
        FedsiloError: the data do not determine the coefficients, or the run failed.
    """
    from fedsilo.engines.regressions import RegressionModel, regression_changes, run_regression
    from fedsilo.reports.regression import Regression

    given = options.run_sources(sources)
    model = RegressionModel(family, outcome, columns, time, event, ties)
    changes = regression_changes(model, trust)
    if dataset is not None:
        changes.append(f"dataset={dataset}")
    given = replace(given, changes=(*changes, *given.changes))
    if deployment is not None:
        from fedsilo.deployment.deployed_run import run

        return Regression.read(run("glm", Path(deployment), given, tell, name=name))
    return Regression.read(run_regression(given, name))


@options.command
def watch(
    folder: Annotated[
        options.MaybePath, "a run directory, or a folder of runs (default: $FEDSILO_RUNS, or runs)"
    ] = None,
    *,
    deployment: options.OptionalDeployment = None,
    hospital: Annotated[
        options.MaybePath, "the folder into which a hospital's kit was opened"
    ] = None,
) -> Callable[[], View]:
    """Show the progress of a run, a folder of runs, a deployment or a hospital's node.

    Returns:
        A function without arguments, which the caller calls for each update. It returns the present
        progress as a ``View``.

    Raises:
        FedsiloError: more than one place is given, or the hospital's folder cannot be used.
    """
    from fedsilo.reports.watch.hospital import HospitalReader
    from fedsilo.reports.watch.run_folder import look_for
    from fedsilo.reports.watch.view import look_at_deployment, look_at_hospital

    given = [place for place in (folder, deployment, hospital) if place is not None]
    if len(given) > 1:
        raise SettingError(
            "name either a run directory or a folder of runs, a deployment by --deployment, or a "
            "hospital by --hospital"
        )
    if deployment is not None:
        return partial(look_at_deployment, Path(deployment))
    if hospital is not None:
        return partial(look_at_hospital, HospitalReader(Path(hospital)))
    return look_for(Path(folder or _default_folder()))


@options.command
def runs(
    folders: Annotated[
        Sequence[AnyRun], "run directories, or folders with them (default: $FEDSILO_RUNS, or runs)"
    ] = (),
    *,
    method: Annotated[str | None, "only runs with this method"] = None,
    dataset: Annotated[str | None, "only runs on this data set"] = None,
    state: Annotated[options.RunState | None, "only runs in this state"] = None,
) -> list[ListedRun]:
    """List the runs in one or more folders, with their state and size.

    Folders are searched down to two levels. The oldest run comes first. A damaged run, or a run of
    another version of fedsilo, is listed as unreadable before all others.

    Raises:
        RunDirectoryError: a folder does not exist.
    """
    from fedsilo.reports.watch.run_list import list_runs

    places = folders_of(several(folders)) or [_default_folder()]
    return list_runs(places, {"method": method, "dataset": dataset, "state": state})


def _default_folder() -> Path:
    """Return the folder of runs that commands read if none is named: $FEDSILO_RUNS, or runs."""
    return Path(os.environ.get("FEDSILO_RUNS") or "runs")


@options.command
def pretrain(
    experiment: options.ExperimentName,
    *,
    save_as: Annotated[
        options.MaybePath, "file to write (default: the file of the setting 'vit.backbone-weights')"
    ] = None,
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> Path:
    """Train an experiment's ViT on public images.

    The images are the public part of the experiment's data set, which no silo holds. By default,
    the weights are written where runs of the experiment look for them.

    Returns:
        The path of the file with the weights.

    Raises:
        FedsiloError: the network is not a ViT, images are missing, or the file exists.
    """
    from fedsilo.finetuning.pretrain import backbone_file, plan_pretraining, train_backbone

    common, recipe = plan_pretraining(experiment, options.run_sources(sources))
    target = path_of(save_as) or backbone_file(common)
    refuse_target(target, "--save-as FILE")
    train_backbone(common, recipe, target, tell)
    return target
