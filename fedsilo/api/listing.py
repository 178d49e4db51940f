"""Lists data sets, settings, methods and experiments, and surveys the data of the sites."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Unpack

from fedsilo.api import options
from fedsilo.core.arguments import AnyPath, Tell, path_of, plugin_texts, silent
from fedsilo.core.errors import DataError, SettingError, unknown_name
from fedsilo.core.one_line import format_count, one_line
from fedsilo.core.settings_schema import Value

_HUGGING_FACE = "hf:"


@options.command
def fetch(
    dataset: Annotated[str, "a name that 'fedsilo datasets' lists, or hf:NAME of Hugging Face"],
    *,
    data_dir: Annotated[options.MaybePath, "folder to write to (default: $FEDSILO_DATA)"] = None,
    base_url: Annotated[str, "another place with the same files"] = "",
    accept_licence: Annotated[bool, "you agree to the data set's terms"] = False,
) -> Iterator[str]:
    """Download a data set's files and verify their checksums.

    Files that already exist with the right checksum are not downloaded again. ``base_url`` replaces
    the address from which files are downloaded. ``hf:NAME`` is a data set of Hugging Face, whose
    files are not verified because they have no checksums.

    Yields:
        The data set's licence, terms and source, then a line for each file and each archive. For
        ``hf:NAME``, lines with the licence, the source, the folder and the settings that use the
        data.

    Raises:
        FedsiloError: no data directory is named, the data set is unknown or does not have public
            files, its terms need ``accept_licence`` to be set, or a download failed.
    """
    from fedsilo.core.files.locations import find_places
    from fedsilo.datasets.downloads.download import fetch
    from fedsilo.datasets.registry import data_set

    if (folder := find_places(str(data_dir or ""), "").data) is None:
        raise SettingError("no data directory is named: give --data-dir, or set $FEDSILO_DATA")
    if dataset.startswith(_HUGGING_FACE):
        from fedsilo.api.hugging_face import fetch_named

        yield from fetch_named(dataset.removeprefix(_HUGGING_FACE), folder)
        return
    public = data_set(dataset).licence
    yield from public.lines() if public else ()
    if public is None or not public.files:
        by_hand = f"; get them from {public.url}" if public and public.terms else ""
        raise DataError(f"data set '{dataset}' has no public files: nothing to fetch{by_hand}")
    # After the lines above, so that users read the terms before they accept them
    public.refuse_unaccepted(accept_licence)
    yield from fetch(public, folder, base_url)


@options.command
def datasets(
    *,
    data_dir: Annotated[options.MaybePath, "the folder to look in (default: $FEDSILO_DATA)"] = None,
) -> list[dict[str, str]]:
    """List the data sets with their licences, and whether their files are on this machine.

    Returns:
        A dictionary of strings for each data set, with the keys ``name``, ``kind``, ``tasks``,
        ``licence``, ``source``, ``size``, ``terms`` and ``here``. ``kind`` is 'public', 'own' (the
        user's own data) or 'made-up'. ``here`` names the files that were found. A string is empty
        if it is unknown or does not apply.
    """
    from fedsilo.datasets.registry import overview

    return overview(str(data_dir or ""))


@options.command
def manifest(
    recipe: Annotated[str, "folder, of images in SITE/CLASS/"],
    folder: Annotated[AnyPath, "the folder of the sites"],
) -> Iterator[str]:
    """Write manifests for images that are sorted into folders by site and class.

    The images are in ``<folder>/SITE/CLASS/``. Each site's folder gets a manifest, a table of its
    images and their classes. ``folder`` also gets the file ``images.yaml``, which lists the
    manifests and the classes. The setting ``dataset=images`` then reads them. ``recipe`` must be
    'folder', the only recipe so far.

    Yields:
        For each manifest, a line with its path and number of images, then a line for each class
        with its number of images. The last line has the setting that uses the data.

    Raises:
        FedsiloError: the recipe is unknown, a file to write already exists, or an image or a name
            cannot be used. Nothing is written in these cases.
    """
    from fedsilo.datasets.images.folders import FOLDER, write_folder_manifests

    if recipe != FOLDER.name:
        raise unknown_name("recipe", recipe, [FOLDER.name])
    folder = Path(folder)
    for path, labels in write_folder_manifests(folder).items():
        yield from _count_lines(path, labels)
    yield f"{folder / 'images.yaml'}: sites and classes; to use it: --set dataset=images"


def _count_lines(path: Path, labels: Counter[str]) -> Iterator[str]:
    """Yield a line with a manifest's number of images, then a line for each label, sorted."""
    yield f"{path}: {format_count(labels.total(), 'image')}"
    for label, count in sorted(labels.items()):
        yield f"  {one_line(label, 60)}: {count}"


@options.command
def survey(
    experiment: options.ExperimentName,
    *,
    deployment: options.OptionalDeployment = None,
    supernodes: options.Supernodes = None,
    name: options.RunName = None,
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> Path:
    """Survey the data of the sites.

    The sites send statistics of their data, such as sample counts, and nothing is trained. The
    sites are the hospitals of ``deployment``. Without a deployment, they are simulated.
    ``experiment`` decides which data set is surveyed and how it is divided into silos. ``name`` is
    the name of the run directory, by default ``survey-<experiment>-<time>``.

    Returns:
        The path of the HTML page about the survey. ``survey.json`` is in the same folder.

    Raises:
        FedsiloError: the experiment is unknown, a hospital is down, or the survey failed.
    """
    from fedsilo.deployment import deployed_run
    from fedsilo.engines.inline_engine import inline_grid
    from fedsilo.engines.planning import plan_run
    from fedsilo.reports.survey.survey_page import write_survey_page
    from fedsilo.server_app.run.survey import run_survey

    # Each survey gets a directory of its own; a method's name may have characters that paths refuse
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    unnamed = f"survey-{re.sub(r'[^A-Za-z0-9._+-]', '-', experiment)}-{stamp}"
    given, place = options.run_sources(sources), path_of(deployment)
    # These override the user's settings, because a survey must never become a training
    own: dict[str, Value] = {
        "run.purpose": "survey",
        "run.name": name or unnamed,
        "run.resume": False,
    }
    if place is not None:
        folder = deployed_run.run(experiment, place, given, tell, overrides=own)
    else:
        plan, resources = plan_run(experiment, given, supernodes=supernodes, overrides=own)
        with inline_grid(plan, int(resources["num-supernodes"])) as grid:
            folder = run_survey(grid, plan, tell).path
    return write_survey_page(folder)


@options.command
def settings(
    word: Annotated[str, "a group, or a word of a setting's name or description"] = "",
    *,
    pyproject: Annotated[
        bool, "print the run-config section of pyproject.toml, built from the code"
    ] = False,
) -> Iterator[str]:
    """List the settings in groups, with default and range.

    Args:
        word: the name of a group, or a word to find in the names and descriptions of settings.
            Empty for all settings.
        pyproject: instead of the list, yield the section of pyproject.toml from which Flower reads
            the defaults. ``word`` is then ignored.

    Yields:
        The lines of the list or of the section.

    Raises:
        SettingError: nothing matches ``word``, not even the former name of a setting.
    """
    from fedsilo.api.listed_settings import list_settings, project_lines

    yield from project_lines() if pyproject else list_settings(word)


@options.command
def methods(*, plugin: options.NewPlugin = None) -> Iterator[str]:
    """List the methods: built-in ones, and those of installed packages and of plugins.

    A plugin is a user's Python file that defines a method. The files in ``plugin`` are executed to
    find their methods. They are then recorded as trusted by this user. Later commands on this
    machine execute trusted files without asking.

    Yields:
        A line "name: description" for each method: first the built-in methods in sorted order, then
        those of installed packages in sorted order, then those of ``plugin`` in the given order.

    Raises:
        FedsiloError: a plugin cannot be loaded.
    """
    from fedsilo.core.methods import METHODS, about, load_plugin_files
    from fedsilo.core.plugins import file_digests, find_plugins, module_of
    from fedsilo.server_app.config.trusted_plugins import remember_plugins

    # The user has named these files, so they may be executed
    entries = plugin_texts(plugin)
    load_plugin_files(", ".join(entries))
    remember_plugins(file_digests(entries))
    for name in [
        *sorted(METHODS),
        *sorted(find_plugins("method", METHODS)),
        *map(module_of, entries),
    ]:
        yield f"{name}: {about(name)}"


@options.command
def experiments(
    experiment: Annotated[
        str | None, "the experiment to show in full; without it, all are listed by method"
    ] = None,
    *,
    method: Annotated[str | None, "list only the experiments with this method"] = None,
    here: Annotated[bool, "list only the experiments whose data are on this machine"] = False,
    check: Annotated[bool, "check all experiments; list those that cannot run"] = False,
    file: options.SimulationFile = None,
) -> Iterator[str]:
    """List the experiments by method, show one in full, or check all of them.

    Only one of ``experiment``, ``method`` and ``check`` may be given. ``here`` may be combined only
    with ``method``.

    Args:
        experiment: show only this experiment, as a simulation file that has nothing else.
        method: list only the experiments with this method.
        here: list only the experiments whose data are on this machine. These are data in the folder
            $FEDSILO_DATA, or data that come with an installed package.
        check: check all experiments of the file, and list only those that cannot run. If all can
            run, one line says so.
        file: the simulation file. None for the one in the working folder or, if there is none,
            fedsilo's own.

    Raises:
        SettingError: arguments that exclude each other are given, a name is unknown, or the file is
            malformed. With ``check``, the error is also raised after the last line if an experiment
            cannot run.
    """
    from fedsilo.api.experiment_list import (
        check_all,
        list_experiments,
        show_experiment,
    )
    from fedsilo.engines.experiments import simulation_file

    if sum([experiment is not None, method is not None, check]) > 1:
        raise SettingError("give only one of an experiment, --method and --check")
    path = simulation_file(path_of(file))
    if here and (check or experiment is not None):
        raise SettingError("--here selects from the list: leave out --check and the experiment")
    if check:
        return check_all(path)
    if experiment is not None:
        return show_experiment(path, experiment)
    return list_experiments(path, method, here)
