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

    Old names of setting keys in its ``settings`` become current names. An unusable plugin, or one
    with the name of one of fedsilo's data sets, raises ``SettingError``.
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

    An unknown key raises ``SettingError``. So does a key under both its old and its current name.
    The argument ``name`` is the plugin's name for the message.
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
        The places of the plugins, in this order. [] if all four are parts of fedsilo itself.

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
    """List the top-level modules of the plugins that a run's recorded settings name.

    Only the current keys for method, network, data set and partition count. fedsilo's own parts are
    skipped. A name with ':' or '.' gives the part before it. An entry point gives the module behind
    it. Any other name counts only if setting 'plugin' lists its file.
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
        SettingError: the data set or the fold does not exist, the image size is 1 to 15 pixels, or
            the partition is impossible. A changed setting that the data set does not read is
            refused too.
        DataError: the file with the partition's silos is unusable.
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
        summary: the content of the run's summary.json. Without 'task', the task is classification.

    Raises:
        SettingError: the task or the needed data set does not exist.
    """
    return shown_metrics(str(summary["dataset"]), str(summary.get("task", CLASSIFICATION)))


def silo_names(settings: CommonSettings) -> list[str]:
    """Return the names of all silos of a run, or [] if only the sites know the names.

    If a partition other than 'own' cuts the silos, the file in 'split.silo-set' names them. Without
    this file they are numbered.

    Raises:
        DataError: files that name the silos are unusable.
        SettingError: the data set does not exist, or 'split.silos' contradicts the file.
    """
    if cuts.is_cut(settings):
        return cuts.cut_names(settings)
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).silo_names(settings, places)


def silo_count(settings: CommonSettings) -> int | None:
    """Return the number of silos of a run, or None if this machine cannot find it out.

    The number is None if only the sites' own files decide it. It is also None if the files that
    name the silos are unusable, or name none.

    Raises:
        SettingError: the data set does not exist, or 'split.silos' contradicts 'split.silo-set'.
    """
    if data_set(settings.dataset).silos_by_files and not cuts.is_cut(settings):
        return None
    try:
        return len(silo_names(settings)) or None
    except DataError:  # the server of a deployment has no data
        return None


def data_fingerprint(settings: CommonSettings) -> str:
    """Compute a SHA-256 digest of a run's data, to compare the data of two runs.

    The digest covers each silo's name, table schema and split checksums. If only the sites know the
    silos' names, it covers no silo.

    Raises:
        DataError: a silo cannot be loaded.
        SettingError: the data set does not exist, or the partition is impossible.
    """
    facts = []
    for name in silo_names(settings):
        silo = load_silo(name, settings)
        facts.append([silo.name, silo.schema, silo.fingerprints])
    return json_digest(facts)


def load_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Load a silo from the cache, and create it there if it is missing.

    A partition other than 'own' cuts new silos from all samples.

    Args:
        name: the silo's name.
        settings: the run's settings.
        places: data and cache directory. None finds them from the settings.

    Raises:
        DataError: the silo is unknown or unusable.
        SettingError: data set or partition is impossible.
    """
    places = places or find_places(settings.data_dir, settings.cache_dir)
    chosen = data_set(settings.dataset)
    if cuts.is_cut(settings):
        return cuts.load_cut(chosen, name, settings, places)
    return chosen.load(name, settings, places)


def cut_of(settings: CommonSettings) -> dict[str, Any] | None:
    """Return the samples that a random partition gives to each silo, so that a run can be repeated.

    Returns:
        The deciding settings, each silo's row indices and a digest. None for the partitions 'own'
        and 'unseen', which are not random.

    Raises:
        SettingError: the data set does not exist, or the partition is impossible.
        DataError: data are unusable or too few.
    """
    if not cuts.is_cut(settings) or settings.partition == "unseen":  # nothing in it is random
        return None
    places = find_places(settings.data_dir, settings.cache_dir)
    return cuts.cut_document(data_set(settings.dataset), settings, places)


def image_reader(site: str, settings: CommonSettings) -> ImageReader:
    """Return a function that reads a new image file exactly as the images of ``site`` are read.

    The function takes a path, and returns an array (channels, height, width). If ``site`` is '',
    changes to only one site's images, such as rotations, are left out.

    Raises:
        DataError: the data set has no usable images.
        SettingError: the data set is unknown.
    """
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).image_reader(site, settings, places)


def overview(data_dir: str) -> list[dict[str, str]]:
    """Describe each of fedsilo's data sets for the command that lists them.

    Args:
        data_dir: the directory to search for files. '' means $FEDSILO_DATA.

    Returns:
        One dictionary of strings per data set, such as 'name', 'licence', 'size' and 'tasks'.
        'here' says which files were found. 'kind' is 'public', 'own' or 'made-up'. Unknown strings
        are ''.
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
