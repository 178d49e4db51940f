"""The data sets by name, and the silos in them; a data set's module is imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedsilo.datasets.io.locations import Places, find_places
from fedsilo.datasets.io.public_files import Licence
from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.datasets.partition.cuts import (
    check_partition,
    cut_document,
    cut_keys,
    cut_names,
    is_cut,
    load_cut,
)
from fedsilo.datasets.silo.silos import DataSet, ImageReader, Silo
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, defaults, unknown_name

DATA_SETS = {
    "digits": "fedsilo.datasets.shifted.shifted:DIGITS",
    "mnist": "fedsilo.datasets.shifted.shifted:MNIST",
    "fmnist": "fedsilo.datasets.shifted.shifted:FMNIST",
    "cifar10": "fedsilo.datasets.shifted.shifted:CIFAR10",
    "cifar100": "fedsilo.datasets.shifted.shifted:CIFAR100",
    "gtsrb": "fedsilo.datasets.shifted.shifted:GTSRB",
    "heart": "fedsilo.datasets.tables.heart:HEART",
    "heart-synthetic": "fedsilo.datasets.tables.heart:HEART_SYNTHETIC",
    "table": "fedsilo.datasets.tables.dataset:TABLE",
    "isic2019": "fedsilo.datasets.images.isic2019:ISIC2019",
    "dermoscopy-phantom": "fedsilo.datasets.synthetic.phantoms:DERMOSCOPY_PHANTOM",
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
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    module, _, attribute = DATA_SETS[name].partition(":")
    data: DataSet = getattr(import_module(module), attribute)
    return data


def licences(name: str) -> Licence | None:
    """Return on what terms a data set may be used; None: it is the user's own, or made up.

    Raises:
        SettingError: there is no such data set.
    """
    return data_set(name).licence


def check_data_settings(settings: CommonSettings) -> None:
    """Refuse what the data set cannot do.

    Raises:
        SettingError: a key that only other data sets read is set, or the data set refuses a value.
    """
    chosen = data_set(settings.dataset)
    check_partition(chosen, settings)
    read = chosen.settings | cut_keys(settings.partition)
    foreign = frozenset().union(*(data_set(name).settings for name in DATA_SETS)) - read
    values, usual = as_mapping(settings), defaults(CommonSettings)
    for key in sorted(foreign):
        if values[key] != usual[key]:
            raise SettingError(
                f"setting '{key}' means nothing to data set '{settings.dataset}': remove it"
            )
    chosen.check(settings)


def silo_names(settings: CommonSettings) -> list[str]:
    """Return the names of the silos, by partition; empty where only the sites know them."""
    chosen = data_set(settings.dataset)
    return cut_names(settings) if is_cut(settings) else chosen.silo_names(settings)


def silo_count(settings: CommonSettings) -> int | None:
    """Return how many silos there are, None where only the sites know."""
    if data_set(settings.dataset).silos_by_files and not is_cut(settings):
        return None
    try:
        return len(silo_names(settings)) or None
    except DataError:  # the server of a deployment has no data
        return None


def data_fingerprint(settings: CommonSettings) -> str:
    """Return a digest of all silos' data and splits, as ``settings`` cut them."""
    silos = [load_silo(name, settings) for name in silo_names(settings)]
    facts = [[silo.name, silo.schema, silo.fingerprints] for silo in silos]
    return json_digest(facts)


def load_silo(name: str, settings: CommonSettings, places: Places | None = None) -> Silo:
    """Return the silo ``name``, from the cache or made now.

    Raises:
        DataError: there is no such silo, a file is missing or unusable, or data are too few.
    """
    places = places or find_places(settings.data_dir, settings.cache_dir)
    chosen = data_set(settings.dataset)
    if is_cut(settings):
        return load_cut(chosen, name, settings, places)
    return chosen.load(name, settings, places)


def cut_of(settings: CommonSettings) -> dict[str, Any] | None:
    """Return how silos were cut (``cut_document``); None where they are the data set's own.

    Raises:
        SettingError, DataError: as of ``load_silo``.
    """
    if not is_cut(settings) or settings.partition == "unseen":  # of which nothing is drawn
        return None
    places = find_places(settings.data_dir, settings.cache_dir)
    return cut_document(data_set(settings.dataset), settings, places)


def image_reader(site: str, settings: CommonSettings) -> ImageReader:
    """Return what makes of a new image's file what the images of a site became.

    Raises:
        DataError: the data set is a table, or its declaration cannot be read.
    """
    places = find_places(settings.data_dir, settings.cache_dir)
    return data_set(settings.dataset).image_reader(site, settings, places)
