"""Lists data sets, settings, methods and experiments, and surveys the data of the sites."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.one_line import counted, one_line
from fedsilo.models.contract.settings_schema import unknown_name
from fedsilo.server_app.run.arguments import (
    AnyPath,
    Sources,
    Tell,
    path_of,
    plugin_texts,
    run_sources,
    silent,
)

if TYPE_CHECKING:
    from fedsilo.server_app.config.experiments import Experiment

_HUGGING_FACE = "hf:"


def fetch(
    dataset: str,
    *,
    data_dir: AnyPath | None = None,
    base_url: str = "",
    accept_licence: bool = False,
) -> Iterator[str]:
    """Download a data set's files and verify their checksums; yield lines about each file.

    ``hf:NAME`` is a data set of Hugging Face, which has no checksums to compare.
    """
    from fedsilo.datasets.io.download import fetch
    from fedsilo.datasets.io.locations import find_places
    from fedsilo.datasets.registry import data_set

    if (folder := find_places(str(data_dir or ""), "").data) is None:
        raise SettingError("no data directory is named: give --data-dir, or set $FEDSILO_DATA")
    if dataset.startswith(_HUGGING_FACE):
        from fedsilo.server_app.api.hugging_face import fetch_named

        yield from fetch_named(dataset.removeprefix(_HUGGING_FACE), folder)
        return
    public = data_set(dataset).licence
    yield from public.lines() if public else ()
    if public is None or not public.files:
        by_hand = f"; get them from {public.url}" if public and public.terms else ""
        raise DataError(f"data set '{dataset}' has no public files: nothing to fetch{by_hand}")
    public.refuse_unaccepted(accept_licence)
    yield from fetch(public, folder, base_url)


def datasets(*, data_dir: AnyPath | None = None) -> list[dict[str, str]]:
    """List the data sets with their licences, and whether their files are on this machine."""
    from fedsilo.datasets.registry import overview

    return overview(str(data_dir or ""))


def manifest(recipe: str, folder: AnyPath) -> Iterator[str]:
    """Write the manifests of images that are sorted into folders."""
    from fedsilo.datasets.images.folders import FOLDER, write_folder_manifests

    if recipe != FOLDER.name:
        raise unknown_name("recipe", recipe, [FOLDER.name])
    folder = Path(folder)
    for path, labels in write_folder_manifests(folder).items():
        yield from _counts(path, labels)
    yield f"{folder / 'images.yaml'}: sites and classes; to use it: --set dataset=images"


def _counts(path: Path, labels: Counter[str]) -> Iterator[str]:
    """Yield a line with a manifest's number of images, then a line for each label."""
    yield f"{path}: {counted(labels.total(), 'image')}"
    for label, count in sorted(labels.items()):
        yield f"  {one_line(label, 60)}: {count}"


def survey(
    experiment: str,
    *,
    deployment: AnyPath | None = None,
    supernodes: int | None = None,
    name: str | None = None,
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> Path:
    """Survey the data of the sites; return the path of the page.

    With ``deployment`` the sites are its hospitals; otherwise they are simulated.
    """
    from fedsilo.server_app.studies.survey.command import survey

    return survey(
        experiment,
        run_sources(sources),
        tell,
        deployment=path_of(deployment),
        supernodes=supernodes,
        name=name,
    )


def settings(word: str = "", *, pyproject: bool = False) -> Iterator[str]:
    """List the settings in groups, with default and range.

    Args:
        word: a group, or a text that the key or the help of a setting must have; empty for all.
        pyproject: build the section of pyproject.toml from the code instead, where Flower finds
            the defaults.
    """
    from fedsilo.server_app.config.listed_settings import list_settings, project_lines

    yield from project_lines() if pyproject else list_settings(word)


def methods(*, plugin: Sequence[AnyPath] | AnyPath | None = None) -> Iterator[str]:
    """List the methods: built-in ones, and those of installed packages and of plugins."""
    from fedsilo.models.contract.methods import METHODS, about, load_plugin_files
    from fedsilo.models.contract.plugs import file_digests, find_plugins, module_of
    from fedsilo.server_app.config.trusted_plugins import remember_plugins

    entries = plugin_texts(plugin)
    load_plugin_files(", ".join(entries))
    remember_plugins(file_digests(entries))
    for name in [
        *sorted(METHODS),
        *sorted(find_plugins("method", METHODS)),
        *map(module_of, entries),
    ]:
        yield f"{name}: {about(name)}"


def experiments(*, file: AnyPath | None = None) -> Iterator[str]:
    """List the experiments by method, with data set, size, silos, rounds and measured minutes."""
    from fedsilo.models.contract.methods import METHODS, about
    from fedsilo.models.contract.settings import CommonSettings
    from fedsilo.server_app.config.experiments import read_experiments, simulation_file

    found = read_experiments(simulation_file(path_of(file)))
    width = max(map(len, found), default=0)
    by_method: dict[str, list[str]] = {}
    for name, experiment in found.items():
        try:
            text = _summary(experiment)
        except SettingError as error:
            text = f"cannot run: {error}"
        method = str(experiment.values.get("method", CommonSettings.method))
        by_method.setdefault(method, []).append(f"  {name:{width}}  {text}")
    for method in sorted(by_method):
        # A plugin is not imported only to describe it
        yield f"{method}: {about(method)}" if method in METHODS else f"{method}: a plugin"
        yield from by_method[method]


def _summary(experiment: "Experiment") -> str:
    """Describe an experiment's data, silos and rounds; SettingError if a setting is wrong."""
    from fedsilo.datasets.registry import DATA_SETS, data_set, silo_count
    from fedsilo.models.contract.methods import METHODS
    from fedsilo.models.contract.settings import CommonSettings
    from fedsilo.models.contract.settings_schema import build, unknown_key
    from fedsilo.server_app.config.settings import declared_defaults

    common, known = build(CommonSettings, experiment.values), declared_defaults()
    for key in experiment.values:
        if key not in known and common.method in METHODS:  # a plugin declares its keys itself
            raise unknown_key(key, known)
    if common.dataset not in DATA_SETS:  # listing experiments must not execute a plugin
        return f"{common.dataset} of a plugin, {counted(common.rounds, 'round')}"
    silos = silo_count(common)
    public = data_set(common.dataset).licence
    size = f" ({public.size_text()})" if public and public.files else ""
    text = f"{common.dataset}{size}, {counted(silos, 'silo') if silos else 'own silos'}, "
    minutes = f", about {experiment.minutes} min on two cores" if experiment.minutes else ""
    return f"{text}{counted(common.rounds, 'round')}{minutes}"
