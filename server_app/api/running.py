"""Starts, resumes and watches one run; also makes projects and pretrains backbones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import TYPE_CHECKING, Unpack

from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.one_line import as_word
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.trusted_plugins import name_plugins
from fedsilo.server_app.run.arguments import (
    AnyPath,
    AnyRun,
    Engine,
    Plugins,
    Sources,
    Tell,
    Track,
    folder_of,
    path_of,
    plugin_texts,
    run_sources,
    silent,
    texts_of,
)
from fedsilo.server_app.studies.api.run import Run, load_run

if TYPE_CHECKING:
    from fedsilo.server_app.records.run_directory import RunDirectory
    from fedsilo.server_app.studies.watch.view import View


def new(project: AnyPath) -> Iterator[str]:
    """Make a folder for experiments of your own; its README has commands that run as they are.

    Raises:
        RunDirectoryError: the folder exists and has files in it.
    """
    folder = Path(project)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirectoryError(f"{folder} already has files in it: choose another name")
    made = Path(__file__).with_name("project")
    copytree(made, folder, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for path in sorted(folder.iterdir()):
        yield str(path)
    yield f"next:  cd {as_word(folder)} && fedsilo simulate first"


def simulate(
    experiment: str,
    *,
    silos: object = None,
    label: str = "label",
    missing: str = "drop",
    network: object = None,
    engine: Engine = "inline",
    ray_address: str | None = None,
    supernodes: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    track: Track | None = None,
    no_pictures: bool = False,
    **sources: Unpack[Sources],
) -> Run:
    """Run an experiment of simulation.yaml, or a method.

    Args:
        experiment: the experiment's name, or a method.
        silos: the caller's own data: site -> a ``DataFrame``, a pair (X, y), a ``Dataset`` of
            PyTorch or of Hugging Face; or one of these, which the setting 'partition' cuts.
        label: the column of the labels in frames and in data sets of Hugging Face.
        missing: 'drop' or 'impute' rows of frames that have a missing value.
        network: the setting 'network', or a function or class of a module that builds one.
        engine: 'inline', 'processes', 'ray' or 'auto'.
        ray_address: the address of a running Ray cluster.
        supernodes: number of simulated sites; None for all silos.
        seed: the seed; None for the experiment's.
        name: name of the run directory; if it exists, a number is appended.
        track: the tracker that also gets the metrics.
        no_pictures: do not draw pictures at the end.
        sources: changes of the experiment.
    """
    from fedsilo.server_app.records.run_directory import with_free_name
    from fedsilo.server_app.run.planning import plan_run, start

    overrides: dict[str, Value] = {} if seed is None else {"seed": seed}
    overrides |= {"run-name": name} if name else {}
    overrides |= {"track": track} if track else {}
    overrides |= {"network": _network_name(network)} if network is not None else {}
    if silos is not None:
        overrides |= _write_silos(silos, label, missing, sources)
    settings, resources = plan_run(
        experiment,
        run_sources(sources),
        supernodes=supernodes,
        overrides=overrides,
        engine=engine,
    )
    directory = start(with_free_name(settings), resources, engine, ray_address)
    return _finish(directory, draw=not no_pictures)


def _finish(directory: RunDirectory, *, draw: bool = True) -> Run:
    """Add what the server leaves to the command that started the run; return the run.

    The server knows no picture and no paper: it has written and printed its own numbers.
    """
    from fedsilo.datasets.registry import data_set
    from fedsilo.server_app.run.terminal import make_console, printer
    from fedsilo.server_app.studies.figures.learning_curves import draw_pictures
    from fedsilo.server_app.studies.published.table import print_published

    run, console = load_run(directory.path), make_console()
    if draw:
        draw_pictures(directory, printer(console))
    headline = data_set(run.summary["dataset"]).headline
    print_published(run.summary, run.finished.paper, headline, console)
    return run


def _network_name(network: object) -> str:
    """Return the setting 'network' for a name, or for a function or class of a module."""
    if isinstance(network, str):
        return network
    module, name = (getattr(network, key, "<") for key in ("__module__", "__qualname__"))
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


def _write_silos(silos: object, label: str, missing: str, sources: Sources) -> dict[str, Value]:
    """Write the caller's data into the cache, and return the settings that read them."""
    from fedsilo.datasets.io.locations import find_places
    from fedsilo.server_app.api.own_silos import write_to_cache
    from fedsilo.server_app.config.settings import parse_assignment

    given = dict(map(parse_assignment, texts_of(sources.get("settings"))))
    places = find_places("", str(given.get("cache-dir", "")))
    dataset, folder = write_to_cache(silos, label, missing, places.cache.resolve())
    return {"dataset": dataset, "data-dir": str(folder)}


def resume(
    run_dir: AnyRun,
    *,
    engine: Engine | None = None,
    supernodes: int | None = None,
    ray_address: str | None = None,
    track: Track | None = None,
    plugin: Plugins = None,
) -> Run:
    """Continue an interrupted run."""
    from fedsilo.server_app.run.planning import plan_resumed_run, start

    name_plugins(plugin_texts(plugin))
    settings, resources, before = plan_resumed_run(
        folder_of(run_dir), supernodes=supernodes, track=track
    )
    directory = start(settings, resources, engine or before, ray_address)
    return _finish(directory)


def watch(
    run_dir: AnyPath | None = None, *, deployment: AnyPath | None = None
) -> Callable[[], View]:
    """Show the progress of a run or a deployment.

    Each call of the returned function reads the progress again.
    """
    from fedsilo.server_app.studies.watch.view import look_at_deployment, look_at_run

    if run_dir is not None and deployment is None:
        return partial(look_at_run, Path(run_dir))
    if deployment is not None and run_dir is None:
        return partial(look_at_deployment, Path(deployment))
    raise SettingError("name either a run directory, or a deployment by --deployment")


def pretrain(
    experiment: str,
    *,
    save_as: AnyPath | None = None,
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> Path:
    """Train an experiment's ViT on public images; return the file of its weights."""
    from fedsilo.server_app.studies.finetune.pretrain import pretrain

    return pretrain(experiment, run_sources(sources), path_of(save_as), tell)
