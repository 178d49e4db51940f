"""Find data sets by name and load their silos.

The module of a data set is imported only when that data set is first used.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any, cast

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.methods import OURS
from fedsilo.core.plugins import (
    PluginPlace,
    find_plugins,
    locate_plugin,
    module_of,
    plugin_entries,
    resolve_plugin,
    wrong_plugin,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import with_current_keys
from fedsilo.core.settings_schema import Value, as_mapping, defaults, keys_of
from fedsilo.core.tasks import CLASSIFICATION, TASKS
from fedsilo.datasets.images.image_data_set import SMALLEST_IMAGE
from fedsilo.datasets.partition import cuts
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from fedsilo.datasets.shifted.sources import SOURCES
from fedsilo.datasets.silo.row_splits import check_folds
from fedsilo.datasets.silo.silos import DataSet, ImageReader, Silo
from fedsilo.models.networks.kinds import OWN_NETWORKS, TIMM
from fedsilo.models.tasks.task import task_class

_UNREAD = {
    "medmnist": "is several data sets",
    "chestmnist": "is multi-label and has no silos of its own: write arrays (docs/tasks.md)",
}
DATA_SETS = {
    **dict.fromkeys(SOURCES, "fedsilo.datasets.shifted.shifted:SHIFTED"),
    "heart": "fedsilo.datasets.tables.heart:HEART",
    "heart-imputed": "fedsilo.datasets.tables.heart:HEART_IMPUTED",
    "heart-indicator": "fedsilo.datasets.tables.heart:HEART_INDICATOR",
    "heart-synthetic": "fedsilo.datasets.tables.heart:HEART_SYNTHETIC",
    "survival-synthetic": "fedsilo.datasets.tables.survival_synthetic:SURVIVAL_SYNTHETIC",
    "tcga-brca": "fedsilo.datasets.tables.tcga_brca:TCGA_BRCA",
    "heart-synthetic-pulse": "fedsilo.datasets.tables.heart:HEART_SYNTHETIC_PULSE",
    "table": "fedsilo.datasets.tables.table_data_set:TABLE",
    "isic2019": "fedsilo.datasets.images.isic2019:ISIC2019",
    "dermoscopy-phantom": "fedsilo.datasets.synthetic.phantoms:DERMOSCOPY_PHANTOM",
    "folder": "fedsilo.datasets.images.folders:FOLDER",
    "arrays": "fedsilo.datasets.images.arrays:ARRAYS",
    "images": "fedsilo.datasets.images.manifests:IMAGES",
    "mammography": "fedsilo.datasets.radiographs.mammography:MAMMOGRAPHY",
    "mini-mias": "fedsilo.datasets.radiographs.mini_mias:MINI_MIAS",
    "pneumoniamnist": "fedsilo.datasets.radiographs.pneumoniamnist:PNEUMONIAMNIST",
    "mammography-phantom": "fedsilo.datasets.synthetic.phantoms:MAMMOGRAPHY_PHANTOM",
    "chest-phantom": "fedsilo.datasets.synthetic.findings:CHEST_PHANTOM",
    "tumours-synthetic": "fedsilo.datasets.synthetic.tumours:TUMOURS",
    "tumours-synthetic-size": "fedsilo.datasets.synthetic.tumours:TUMOUR_SIZES",
    "endovascular": "fedsilo.datasets.radiographs.endovascular:ENDOVASCULAR",
    "angiogram-phantom": "fedsilo.datasets.synthetic.phantoms:ANGIOGRAM_PHANTOM",
    "masks": "fedsilo.datasets.radiographs.masks:MASK_IMAGES",
    "vessels-synthetic": "fedsilo.datasets.synthetic.vessels:VESSELS_SYNTHETIC",
}


def data_set(name: str) -> DataSet:
    """Return the ``DataSet`` object with this name, which is one of fedsilo's or a plugin's.

    Raises:
        SettingError: no data set or plugin has this name, or the plugin's object is not a data set.
            The names 'medmnist' and 'chestmnist' are refused too, because they have no silos.
    """
    if name in _UNREAD:
        raise SettingError(f"data set '{name}' {_UNREAD[name]}: name one of {', '.join(MEDMNIST)}")
    if name not in DATA_SETS:
        return _load_plugin(name)
    module, _, attribute = DATA_SETS[name].partition(":")
    data = getattr(import_module(module), attribute)
    if isinstance(data, dict):  # several data sets of one kind, by name
        data = data[name]
    return cast(DataSet, data)


def _load_plugin(name: str) -> DataSet:
    """Load the data set of a plugin, which provides a ``DataSet`` object or a subclass of it.

    A class is called without arguments. The object's ``settings`` (the keys that it reads) are
    changed: today's names replace old names.

    Args:
        name: the plugin's name.

    Raises:
        SettingError: in one of these cases:

            - The plugin does not exist or cannot be imported, or is not a ``DataSet``.
            - The object's ``settings`` have an unknown key, or the old and new name of one key.
            - The object's own ``name`` is the name of one of fedsilo's data sets.
    """
    found = resolve_plugin("dataset", name, DATA_SETS)
    data = found
    if isinstance(found, type) and not inspect.isabstract(found):
        data = found()
    if not isinstance(data, DataSet):
        raise wrong_plugin("dataset", name, found, "DataSet of fedsilo.datasets.silo.silos")
    data.settings = _current_keys(name, data.settings)  # type: ignore[misc]
    if data.name in DATA_SETS:  # its silos would be looked up in that one's cache
        raise SettingError(
            f"data set '{name}' calls itself '{data.name}', but that name is taken: give it another"
        )
    return data


def _current_keys(name: str, keys: Iterable[str]) -> frozenset[str]:
    """Return the settings that a plugin's data set reads, with today's keys in place of old ones.

    For each old key, the user is told the new one.

    Args:
        name: the plugin's name, for messages.
        keys: the keys of the settings.

    Raises:
        SettingError: a key is unknown, or is given under both its old and its new name.
    """
    current = with_current_keys(dict.fromkeys(keys, ""), f"data set '{name}', 'settings'")
    for key in current:
        if key not in defaults(CommonSettings):
            raise SettingError(
                f"data set '{name}' lists the unknown setting '{key}' in its 'settings': correct it"
            )
    return frozenset(current)


# Settings field that may name a plugin -> the names that fedsilo itself defines
_OURS: Mapping[str, Collection[str]] = {
    "method": OURS,
    "network": OWN_NETWORKS,
    "dataset": DATA_SETS,
    "partition": cuts.PARTITIONS,
}


def _is_ours(key: str, name: str) -> bool:
    return name in _OURS[key] or (key == "network" and name.startswith(TIMM))


def plugs_of(settings: CommonSettings) -> list[PluginPlace]:
    """Find the plugins that a run's settings name for method, network, data set and partition.

    The plugins are located, but not imported.

    Returns:
        The place of each plugin, in this order. The list is empty if all four settings name parts
        of fedsilo itself.

    Raises:
        SettingError: a setting names neither a part of fedsilo nor a plugin.
    """
    plugins = []
    for key, ours in _OURS.items():
        name = str(getattr(settings, key))
        if not _is_ours(key, name):
            plugins.append(locate_plugin(key, name, ours))
    return plugins


def plugin_modules(values: Mapping[str, Value]) -> list[str]:
    """List the top-level modules of the plugins that the recorded settings of a run name.

    Nothing is imported. Only the settings for method, network, data set and partition are searched:

    - A name with a ':' or '.', or a name that an entry point declares, gives the top-level package
      of its module.
    - A plain name gives a module only if setting 'plugin' lists a file of that module's name.
    - All other names, such as those of fedsilo's own parts, are skipped.

    Args:
        values: setting key -> value, with today's keys. A plugin under an old key is not found.
    """
    files = set(map(module_of, plugin_entries(str(values.get("plugin", "")))))
    modules = []
    keys = keys_of(CommonSettings)
    for key, ours in _OURS.items():
        name = values.get(keys[key])
        if not isinstance(name, str) or _is_ours(key, name):
            continue
        place = name
        if ":" not in name:  # an entry point, which an installed package declares
            place = find_plugins(key, ours).get(name, name)
        top = re.split("[.:]", place)[0]
        # A plain name is a module only if 'plugin' lists its file
        if place != top or top in files:
            modules.append(top)
    return modules


def check_data_settings(settings: CommonSettings) -> None:
    """Check that the run's settings fit its data set, without reading the data.

    Raises:
        SettingError: the data set does not exist, or a setting that only other data sets read
            differs from its default. Or the partition is impossible, a fold does not exist, or the
            image size is 1 to 15 pixels.
        DataError: the file that names the partition's silos (the silo set) cannot be read.
    """
    chosen = data_set(settings.dataset)
    cuts.check_partition(chosen, settings)
    read = chosen.settings | cuts.cut_keys(settings.partition)
    # Of images only a numeric outcome is standardised
    if not chosen.is_table and not TASKS[settings.task].numeric:
        read = read - {"data.standardise"}
    # Keys that any data set reads. One that only others read would have no effect, which its user
    # would not notice
    known: set[str] = set()
    for name in DATA_SETS:
        known.update(data_set(name).settings)
    values = as_mapping(settings)
    usual = defaults(CommonSettings)
    for key in sorted(known - read):
        if values[key] != usual[key]:
            raise SettingError(
                f"'{key}' has no effect with data set '{settings.dataset}': remove it"
            )
    check_folds(settings)
    if 0 < settings.image_size < SMALLEST_IMAGE:
        raise SettingError(
            f"'data.image-size' must be 0 or at least {SMALLEST_IMAGE}, but is "
            f"{settings.image_size}"
        )


def shown_metrics(dataset: str, task: str) -> tuple[str, ...]:
    """Return the names of the metrics in a run's result tables, the most important one first.

    They are the metrics of the task if the task has a list of metrics. Otherwise they are those of
    the data set.

    Raises:
        SettingError: the task does not exist. Or the task has no list, and the data set does not
            exist.
    """
    return task_class(task).shown or data_set(dataset).headline


def shown_of(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the metrics in a finished run's result tables, the most important first.

    Args:
        summary: the content of the run's summary.json, with the keys 'dataset' and 'task'. Without
            'task', the task is classification.

    Raises:
        SettingError: the task or the data set does not exist, as in ``shown_metrics``.
    """
    return shown_metrics(str(summary["dataset"]), str(summary.get("task", CLASSIFICATION)))


def silo_names(settings: CommonSettings) -> list[str]:
    """Return the names of all silos of a run, or [] if only the sites know the names.

    They are the data set's silos, or those that the run's partition cuts from its samples.

    Raises:
        DataError: the files that name the silos are missing or unusable.
        SettingError: no data set has the name in the settings, or 'split.silos' contradicts the
            silo set.
    """
    if cuts.is_cut(settings):
        return cuts.cut_names(settings)
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).silo_names(settings, places)


def silo_count(settings: CommonSettings) -> int | None:
    """Return the number of silos of a run, or None if this machine cannot know it.

    It is None in three cases:

    - The partition is 'own' (the silos of the data set), and files at each site decide which silos
      exist.
    - The files that name the silos are missing or unusable.
    - The data set names no silos.

    Raises:
        SettingError: no data set has the name in the settings, or 'split.silos' contradicts the
            silo set.
    """
    if data_set(settings.dataset).silos_by_files and not cuts.is_cut(settings):
        return None
    try:
        return len(silo_names(settings)) or None
    except DataError:  # the server of a deployment has no data
        return None


def data_fingerprint(settings: CommonSettings) -> str:
    """Compute a SHA-256 digest of the run's data: all silos' names, schemas and split checksums.

    Every silo is loaded. Equal digests mean equal data and equal splits. If only the sites know the
    silos' names, no silo is included, and the digest is the same for all data.

    Raises:
        DataError: a silo cannot be loaded.
        SettingError: no data set has the name in the settings, or the partition is impossible.
    """
    facts = []
    for name in silo_names(settings):
        silo = load_silo(name, settings)
        facts.append([silo.name, silo.schema, silo.fingerprints])
    return json_digest(facts)


def load_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Load the silo ``name`` from the cache, or create it there first if it is missing.

    If ``settings.partition`` is not 'own', the silo is cut from all samples of the data set
    together (``load_cut``).

    Args:
        name: the silo's name.
        settings: the run's settings.
        places: data and cache directory. None finds them from the settings.

    Raises:
        DataError: no silo has this name, a file is missing or unusable, or there are too few
            samples.
        SettingError: no data set has the name in the settings, or the partition is impossible.
    """
    places = places or find_places(settings.data_dir, settings.cache_dir)
    chosen = data_set(settings.dataset)
    if cuts.is_cut(settings):
        return cuts.load_cut(chosen, name, settings, places)
    return chosen.load(name, settings, places)


def cut_of(settings: CommonSettings) -> dict[str, Any] | None:
    """Record which samples a random partition gives to each silo, so that a run can be repeated.

    The cut is computed from the settings and the data set's labels, for which the data may be
    loaded.

    Returns:
        The result of ``cut_document``: the deciding settings, each silo's row indices and a digest.
        None for the partitions 'own' and 'unseen', which are not random.

    Raises:
        SettingError: the partition is impossible with the data set's labels, or its plugin is
            missing or fails. Or 'split.silos' contradicts the silo set, or no data set has the name
            in the settings.
        DataError: data or the silo set are missing or unusable, or there are too few samples.
    """
    if not cuts.is_cut(settings) or settings.partition == "unseen":  # nothing in it is random
        return None
    places = find_places(settings.data_dir, settings.cache_dir)
    return cuts.cut_document(data_set(settings.dataset), settings, places)


def image_reader(site: str, settings: CommonSettings) -> ImageReader:
    """Return a function that reads a new image file in the same way as the images of ``site``.

    The function takes a path and returns an array (channels, height, width), as in
    ``Split.inputs``. If ``site`` is '', changes that are special to one site, such as a rotation,
    are left out.

    Raises:
        DataError: the data set is a table, or its files cannot be read.
        SettingError: no data set has the name in the settings.
    """
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).image_reader(site, settings, places)


def overview(data_dir: str) -> list[dict[str, str]]:
    """Describe each of fedsilo's data sets for the command that lists them.

    Args:
        data_dir: the directory to search for files. '' means $FEDSILO_DATA.

    Returns:
        For each data set, a dictionary of strings, which are '' if unknown or not applicable. Its
        keys are:

        - ``name``, ``licence``, ``source``, ``size`` and ``terms``.
        - ``kind``: public, own or made-up.
        - ``tasks``: the names of the tasks that it has labels for, with commas between.
        - ``here``: the files that were found.
    """
    places = find_places(data_dir, "")
    rows = []
    for name in DATA_SETS:
        data = data_set(name)
        row = {"name": name, "kind": data.origin, "here": data.found(places)}
        row["tasks"] = ", ".join(data.tasks)
        # Every row has the same keys, also for data sets that nobody publishes
        row |= dict.fromkeys(("licence", "source", "size", "terms"), "")
        public = data.licence
        if public:
            row["licence"] = public.licence
            row["source"] = public.url
            row["size"] = public.size_text()
            row["terms"] = public.terms
        rows.append(row)
    return rows
