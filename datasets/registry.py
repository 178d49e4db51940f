"""The data sets by name, and the silos in them; a data set's module is imported when first used."""

import inspect
import re
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, cast

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.methods import METHODS
from fedsilo.core.plugins import (
    Plug,
    find_plugins,
    locate_plugin,
    module_of,
    plug,
    plugin_entries,
    wrong,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, as_mapping, defaults, keys_of
from fedsilo.datasets.images.image_data_set import SMALLEST_IMAGE
from fedsilo.datasets.partition import cuts
from fedsilo.datasets.shifted.medmnist import MEDMNIST
from fedsilo.datasets.shifted.sources import SOURCES
from fedsilo.datasets.silo.row_splits import check_folds
from fedsilo.datasets.silo.silos import DataSet, ImageReader, Silo
from fedsilo.models.networks.kinds import OWN_NETWORKS, TIMM

_UNREAD = {
    "medmnist": "is several data sets",
    "chestmnist": "is multi-label, up to 14 findings an image, and networks here predict one class",
}
DATA_SETS = {
    **dict.fromkeys(SOURCES, "fedsilo.datasets.shifted.shifted:SHIFTED"),
    "heart": "fedsilo.datasets.tables.heart:HEART",
    "heart-imputed": "fedsilo.datasets.tables.heart:HEART_IMPUTED",
    "heart-indicator": "fedsilo.datasets.tables.heart:HEART_INDICATOR",
    "heart-synthetic": "fedsilo.datasets.tables.heart:HEART_SYNTHETIC",
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
    "endovascular": "fedsilo.datasets.radiographs.endovascular:ENDOVASCULAR",
    "angiogram-phantom": "fedsilo.datasets.synthetic.phantoms:ANGIOGRAM_PHANTOM",
}


def data_set(name: str) -> DataSet:
    """Return the data set of that name, or raise a ``SettingError`` with the known ones."""
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
    """Load the data set of a plugin."""
    found = plug("dataset", name, DATA_SETS)
    data = found
    if isinstance(found, type) and not inspect.isabstract(found):
        data = found()
    if not isinstance(data, DataSet):
        raise wrong("dataset", name, found, "DataSet of fedsilo.datasets.silo.silos")
    if data.name in DATA_SETS:  # its silos would be looked up in that one's cache
        raise SettingError(
            f"data set '{name}' calls itself '{data.name}', but that name is taken: give it another"
        )
    return data


# Field of the settings that may name a plugin -> the names of fedsilo itself
_OURS: Mapping[str, Collection[str]] = {
    "method": METHODS,
    "network": OWN_NETWORKS,
    "dataset": DATA_SETS,
    "partition": cuts.PARTITIONS,
}


def _is_ours(key: str, name: str) -> bool:
    return name in _OURS[key] or (key == "network" and name.startswith(TIMM))


def plugs_of(settings: CommonSettings) -> list[Plug]:
    """Return the plugs that a run names, not imported; a ``SettingError`` if there is no such."""
    plugins = []
    for key, ours in _OURS.items():
        name = str(getattr(settings, key))
        if not _is_ours(key, name):
            plugins.append(locate_plugin(key, name, ours))
    return plugins


def plugin_modules(values: Mapping[str, Value]) -> list[str]:
    """Return the modules in which recorded settings name an object, without importing one.

    ``values`` must have today's keys: a plugin under a former name would be overlooked here. Of a
    module in a package it is the package. A name that is neither fedsilo's nor could be a
    module is left out: whoever builds the settings refuses it.
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
        if place != top or top in files:
            modules.append(top)
    return modules


def check_data_settings(settings: CommonSettings) -> None:
    """Refuse what the data set cannot do.

    Raises:
        SettingError: a key that only other data sets read is set, a fold does not exist, or images
            would be too small.
    """
    chosen = data_set(settings.dataset)
    cuts.check_partition(chosen, settings)
    read = chosen.settings | cuts.cut_keys(settings.partition)
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


def silo_names(settings: CommonSettings) -> list[str]:
    """Return the names of the silos, by partition, or none if only the sites know them."""
    if cuts.is_cut(settings):
        return cuts.cut_names(settings)
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).silo_names(settings, places)


def silo_count(settings: CommonSettings) -> int | None:
    """Return the number of silos, or None if only the sites know it."""
    if data_set(settings.dataset).silos_by_files and not cuts.is_cut(settings):
        return None
    try:
        return len(silo_names(settings)) or None
    except DataError:  # the server of a deployment has no data
        return None


def data_fingerprint(settings: CommonSettings) -> str:
    """Return a digest of all silos' data and splits, as ``settings`` cut them."""
    facts = []
    for name in silo_names(settings):
        silo = load_silo(name, settings)
        facts.append([silo.name, silo.schema, silo.fingerprints])
    return json_digest(facts)


def load_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Return the silo ``name``, from the cache or made now.

    Raises:
        DataError: there is no such silo, a file is missing or unusable, or data are too few.
    """
    places = places or find_places(settings.data_dir, settings.cache_dir)
    chosen = data_set(settings.dataset)
    if cuts.is_cut(settings):
        return cuts.load_cut(chosen, name, settings, places)
    return chosen.load(name, settings, places)


def cut_of(settings: CommonSettings) -> dict[str, Any] | None:
    """Return the ``cut_document`` of the silos, or None if they are the data set's own."""
    if not cuts.is_cut(settings) or settings.partition == "unseen":  # nothing in it is random
        return None
    places = find_places(settings.data_dir, settings.cache_dir)
    return cuts.cut_document(data_set(settings.dataset), settings, places)


def image_reader(site: str, settings: CommonSettings) -> ImageReader:
    """Return the function that reads a new image's file as the images of a site were read.

    Raises:
        DataError: the data set is a table, or its declaration cannot be read.
    """
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).image_reader(site, settings, places)


def overview(data_dir: str) -> list[dict[str, str]]:
    """Return a row for each data set.

    Args:
        data_dir: where to look for files; empty for $FEDSILO_DATA.

    Returns:
        Texts by ``name``, ``kind`` (public, own, synthetic), ``licence``, ``source``, ``size``,
        ``terms`` and ``here``, empty where there is nothing to say.
    """
    places = find_places(data_dir, "")
    rows = []
    for name in DATA_SETS:
        data = data_set(name)
        row = {"name": name, "kind": data.origin, "here": data.found(places)}
        row |= dict.fromkeys(("licence", "source", "size", "terms"), "")
        public = data.licence
        if public:
            row["licence"] = public.licence
            row["source"] = public.url
            row["size"] = public.size_text()
            row["terms"] = public.terms
        rows.append(row)
    return rows
