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

    The folder gets ``simulation.yaml`` with experiments, ``network.py`` with an example of a
    network, and ``README.md`` with commands that run unchanged. The folder may already exist if it
    is empty.

    Yields:
        The path of each file in the new folder. The last line is the command to run next.

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

    Args:
        experiment: the name of an experiment in the simulation file, or of a method.
        silos: the caller's own data: site -> a ``DataFrame``, a pair (X, y), or a ``Dataset`` of
            PyTorch or of Hugging Face. Data without sites are divided by 'split.partition'. None
            for the experiment's data.
        label: the column with the labels in frames and in data sets of Hugging Face.
        missing: 'drop' rows with missing values from a frame, or 'impute' the values.
        network: the setting 'network.name', or a function or class of a module that builds a
            network.
        engine: where the sites run. 'inline' is this process, 'processes' are several processes,
            'ray' is a Ray cluster, and 'auto' chooses.
        ray_address: the address of a running Ray cluster.
        supernodes: number of simulated sites. None for the experiment's number or, without one, for
            all silos.
        seed: the seed. None for the experiment's.
        name: name of the run directory. If it exists, a number is appended.
        track: the name of an experiment tracker that also gets the metrics.
        no_pictures: do not draw pictures at the end.
        sources: the files and changes that give the experiment's settings.

    Returns:
        The finished run, opened for reading.

    Raises:
        FedsiloError: the experiment, a setting or the data cannot be used, or the run failed.
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

    If a paper reports the run's method on its data, the metrics of the run and of the paper are
    printed. If the paper's experiment had other settings, a line with these differences is printed
    instead. If there is no such paper, nothing is printed. If ``draw`` is False, no pictures are
    drawn.
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

    A string is returned unchanged and unchecked. A function or a class becomes 'MODULE:NAME', the
    name by which the processes of the sites import it.

    Raises:
        SettingError: ``network`` is neither a string nor a function or class. Also raised if the
            function is a lambda, or if it is defined in the running script or within a function.
            Other processes cannot import it then.
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

    The cache folder is the value of 'data.cache-dir' among the ``settings`` of ``sources``, or else
    the default one. ``silos``, ``label`` and ``missing`` are those of ``simulate``.

    Returns:
        The settings 'dataset' and 'data.dir', which make a run read these data.

    Raises:
        FedsiloError: the data are of an unknown kind, or cannot be used.
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

    Hospitals send sums of gradients and Hessians over their patients. These sums determine the same
    coefficients and standard errors as the pooled rows would. In a Cox regression, each hospital
    has its own baseline hazard, so the result is that of a stratified pooled regression.

    Returns:
        The regression. ``document`` has all numbers, ``coefficients`` a row per coefficient.

    Raises:
        FedsiloError: a setting or the data cannot be used, or the run failed. A FitError says that
            the data do not determine the coefficients, for example because a column is constant.
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
        A function without arguments, which the caller calls again for each update. It reads the
        present progress and returns it as a ``View``, which can be shown as a line, in a terminal
        or as a page.

    Raises:
        SettingError: more than one of ``folder``, ``deployment`` and ``hospital`` is given, or the
            hospital's site file is not valid.
        KitError: ``hospital`` is not the folder of an opened kit.
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

    Folders are searched down to two levels, without following links. A folder may also be a run
    directory itself. Runs are sorted by their start, the oldest first. A damaged run, or a run of
    another version of fedsilo, is listed as unreadable and comes before all readable runs.

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

    The images are the public part of the experiment's data set, which no silo holds. The ViT is
    trained to classify them. By default the weights are written to the file in which runs of the
    experiment look for them.

    Returns:
        The path of the file with the weights.

    Raises:
        FedsiloError: the experiment's network is not a ViT, there are too few public images, the
            file already exists, or training diverged.
    """
    from fedsilo.finetuning.pretrain import backbone_file, plan_pretraining, train_backbone

    common, recipe = plan_pretraining(experiment, options.run_sources(sources))
    target = path_of(save_as) or backbone_file(common)
    refuse_target(target, "--save-as FILE")
    train_backbone(common, recipe, target, tell)
    return target
