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
    """Return the ``DataSet`` object with this name, from fedsilo or from a plugin.

    Raises:
        SettingError: no data set or plugin has this name, or the plugin's object is not a
            ``DataSet``. The names 'medmnist', which stands for several data sets, and 'chestmnist',
            which has no silos, are also refused.
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
    """Load the data set of a plugin, which provides a ``DataSet`` object or a class for one.

    A class is called without arguments to create the object. Old names of setting keys in the
    object's ``settings`` are replaced by their current names.

    Args:
        name: the plugin's name.

    Raises:
        SettingError: in one of these cases:

            - The plugin does not exist or cannot be imported.
            - The plugin provides neither a ``DataSet`` object nor a class for one.
            - The object's ``settings`` have an unknown key, or the old and new name of one key.
            - The object's ``name`` is the name of one of fedsilo's data sets.
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
    """Replace old names of setting keys that a plugin's data set reads by their current names.

    A later log message tells the user the current name of each old key.

    Args:
        name: the plugin's name, for messages.
        keys: the keys of the settings.

    Raises:
        SettingError: a key is unknown, or is given under both its old and its current name.
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
        The places of the plugins, in the order method, network, data set, partition. The list is
        empty if all four are parts of fedsilo itself.

    Raises:
        SettingError: a setting names something that is neither a part of fedsilo nor a plugin.
    """
    plugins = []
    for key, ours in _OURS.items():
        name = str(getattr(settings, key))
        if not _is_ours(key, name):
            plugins.append(locate_plugin(key, name, ours))
    return plugins


def plugin_modules(values: Mapping[str, Value]) -> list[str]:
    """List the top-level modules of the plugins that a run's recorded settings name.

    Only the settings for method, network, data set and partition are searched:

    - A name of one of fedsilo's own parts is skipped.
    - A name with ':' or '.' gives the part before the first of these characters.
    - An entry point that an installed package declares gives the top-level module that it points
      to.
    - Any other name is a module if setting 'plugin' lists a file of this name. Otherwise it is
      skipped.

    Args:
        values: setting key -> value, with current keys. A plugin under an old key is not found.
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
        SettingError: in one of these cases:

            - The data set does not exist.
            - A setting that only other data sets read differs from its default.
            - The settings of the partition, which cuts the silos, contradict each other or the data
              set.
            - The chosen test or validation fold does not exist.
            - The image size is 1 to 15 pixels.
        DataError: the file that names the partition's silos cannot be read.
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

    The metrics are those of the task if the task has a list of metrics. Otherwise they are those of
    the data set.

    Raises:
        SettingError: the task does not exist, or the task has no list and the data set does not
            exist.
    """
    return task_class(task).shown or data_set(dataset).headline


def shown_of(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the metrics in a finished run's result tables, the most important first.

    The metrics are the task's, or the data set's if the task lists none.

    Args:
        summary: the content of the run's summary.json, with the keys 'dataset' and 'task'. Without
            'task', the task is classification.

    Raises:
        SettingError: the task does not exist, or neither its list nor the data set exists.
    """
    return shown_metrics(str(summary["dataset"]), str(summary.get("task", CLASSIFICATION)))


def silo_names(settings: CommonSettings) -> list[str]:
    """Return the names of all silos of a run, or [] if only the sites know the names.

    With the partition 'own', the data set names its silos, such as hospitals. It may return [] if
    the samples are only at the sites. Any other partition cuts the silos from all samples of the
    data set. Their names then come from the file in 'split.silo-set', or are silo-1, silo-2 and so
    on if that setting is empty.

    Raises:
        DataError: the files that name the silos are missing or unusable.
        SettingError: the data set does not exist, or 'split.silos' differs from the number of silos
            in 'split.silo-set'.
    """
    if cuts.is_cut(settings):
        return cuts.cut_names(settings)
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).silo_names(settings, places)


def silo_count(settings: CommonSettings) -> int | None:
    """Return the number of silos of a run, or None if this machine cannot find it out.

    The number is None in these cases:

    - Each site's own files decide whether the site has a silo, and no partition cuts the silos.
    - The files that name the silos are missing or unusable on this machine.
    - The data set has an empty list of silos.

    Raises:
        SettingError: the data set does not exist, or 'split.silos' differs from the number of silos
            in 'split.silo-set'.
    """
    if data_set(settings.dataset).silos_by_files and not cuts.is_cut(settings):
        return None
    try:
        return len(silo_names(settings)) or None
    except DataError:  # the server of a deployment has no data
        return None


def data_fingerprint(settings: CommonSettings) -> str:
    """Compute a SHA-256 digest of a run's data, to compare the data of two runs.

    Every silo is loaded. The digest covers each silo's name, table schema and split checksums. If
    only the sites know the silos' names, no silo is covered, so the digest says nothing about the
    data.

    Raises:
        DataError: a silo cannot be loaded.
        SettingError: the data set does not exist, or the partition is impossible with this data.
    """
    facts = []
    for name in silo_names(settings):
        silo = load_silo(name, settings)
        facts.append([silo.name, silo.schema, silo.fingerprints])
    return json_digest(facts)


def load_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Load the silo ``name`` from the cache, and create it there if it is missing.

    If ``settings.partition`` is 'own', the silo is one of the data set's silos. Otherwise the
    partition joins the samples of all these silos, and cuts new silos from them.

    Args:
        name: the silo's name.
        settings: the run's settings.
        places: data and cache directory. None finds them from the settings.

    Raises:
        DataError: no silo has this name, a file is missing or unusable, or there are too few
            samples.
        SettingError: the data set does not exist, or the partition is impossible with this data.
    """
    places = places or find_places(settings.data_dir, settings.cache_dir)
    chosen = data_set(settings.dataset)
    if cuts.is_cut(settings):
        return cuts.load_cut(chosen, name, settings, places)
    return chosen.load(name, settings, places)


def cut_of(settings: CommonSettings) -> dict[str, Any] | None:
    """Return the samples that a random partition gives to each silo, so that a run can be repeated.

    The partition needs the data set's labels, and loads them if necessary.

    Returns:
        A dictionary with the deciding settings, each silo's row indices and a digest. None for the
        partitions 'own' and 'unseen', which are not random.

    Raises:
        SettingError: the data set does not exist, the partition is impossible with these labels, or
            the partition's plugin is missing or fails. The error also occurs if 'split.silos'
            differs from the number of silos in 'split.silo-set'.
        DataError: data or the file in 'split.silo-set' are missing or unusable, or there are too
            few samples.
    """
    if not cuts.is_cut(settings) or settings.partition == "unseen":  # nothing in it is random
        return None
    places = find_places(settings.data_dir, settings.cache_dir)
    return cuts.cut_document(data_set(settings.dataset), settings, places)


def image_reader(site: str, settings: CommonSettings) -> ImageReader:
    """Return a function that reads a new image file exactly as the images of ``site`` are read.

    The function takes a path, and returns an array (channels, height, width) like an image in
    ``Split.inputs``. If ``site`` is '', a change that only one site's images get, such as a
    rotation, is left out.

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
        One dictionary of strings per data set. A string is '' if unknown or not applicable. The
        keys are:

        - ``name``, ``licence``, ``source``, ``size`` and ``terms``.
        - ``kind``: 'public', 'own' (the user's files) or 'made-up'.
        - ``tasks``: the names of the tasks that the data set has labels for, joined by ', '.
        - ``here``: a few words on the files that were found, such as 'K of N files in FOLDER'.
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
