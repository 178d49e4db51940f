"""Partition ``unseen``: silos cut by label, a share of each silo's labels at no other silo.

FedEFM (section on unseen data): at 1 the silos' label sets are disjoint, at 0 identical. Images of
all sites are pooled, each in its own part, and no image is at two silos. A silo trains on the
labels that it holds. Its validation and test images are of *all* labels, since the method is to
recognise what only others have seen, and settings are to be chosen on what is reported; they differ
from silo to silo. The run's seed decides none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.images.dataset import ImageDataSet
from datasets.io.locations import Places, find_places
from datasets.partition.label_sets import LabelCut, Labels, Rows, label_sets
from datasets.partition.silo_sets import open_silo_set
from datasets.shifted.pools import open_pool
from datasets.shifted.shifted import ShiftedImages, scaled, shift
from datasets.shifted.tracks import hold_out_tracks
from datasets.silo.cache import cached_silo
from datasets.silo.silos import SPLITS, DataSet, Silo, Split, no_such_silo, save_silo
from models.contract.errors import DataError, SettingError
from models.contract.settings import CommonSettings
from models.contract.settings_schema import keys_with

UNSEEN = "unseen"  # the partition, and the distribution of its silos
KEYS = frozenset(keys_with(CommonSettings, "silo"))  # read under it by any data set

_MAKER = 1  # raise it when the same rows make other arrays, so that no old cache is read


def check_partition(data: DataSet, settings: CommonSettings) -> None:
    """Refuse a partition that cannot be, before anything is read.

    Raises:
        SettingError: 'unseen' is set without its partition or impossible with the labels that there
            are, the data set is a table, or 'silos' contradicts 'silo-set'.
        DataError: the silo set cannot be read.
    """
    if settings.partition != UNSEEN:
        if settings.unseen != CommonSettings().unseen:
            raise SettingError(
                "setting 'unseen' means nothing without partition 'unseen': remove it, or set "
                "'partition' to 'unseen'"
            )
        return
    _refuse_table(data)
    classes, silos = _known_classes(data, settings), len(unseen_names(settings))
    if classes is not None:
        label_sets(classes, silos, settings.unseen)


def _refuse_table(data: DataSet) -> None:
    if data.is_table:
        raise SettingError(
            f"data set '{data.name}' is a table, and partition 'unseen' cuts images by label: "
            "choose another data set, or set 'partition' to 'own'"
        )


def _known_classes(data: DataSet, settings: CommonSettings) -> int | None:
    """Return the number of labels, None where the data must say."""
    if isinstance(data, ShiftedImages):
        return data.source.classes
    if not isinstance(data, ImageDataSet):
        return None
    try:
        places = find_places(settings.data_dir, settings.cache_dir)
        return len(data.classes(settings, places))
    except DataError:  # the server of a deployment has no data
        return None


def unseen_names(settings: CommonSettings) -> list[str]:
    """Return the silo set's names where one is set, else silo-1, silo-2, ..., as long as the last.

    Raises:
        SettingError: 'silos' is neither its default nor the number of silos in the set.
        DataError: the silo set cannot be read.
    """
    if not settings.silo_set:
        digits = len(str(settings.silos))
        return [f"silo-{number:0{digits}}" for number in range(1, settings.silos + 1)]
    names = list(open_silo_set(settings.silo_set).names)
    if settings.silos not in (CommonSettings().silos, len(names)):
        raise SettingError(
            f"setting 'silos' is {settings.silos}, and silo set '{settings.silo_set}' has "
            f"{len(names)} silos: remove it"
        )
    return names


def load_unseen(data: DataSet, name: str, settings: CommonSettings, places: Places) -> Silo:
    """Return the silo ``name`` of all data of ``data``, from the cache or cut now.

    Raises:
        SettingError: the data set is a table, or 'unseen' impossible with its labels.
        DataError: there is no such silo, data are missing or unusable, or too few.
    """
    _refuse_table(data)
    names = unseen_names(settings)
    if name not in names:
        if settings.silo_set:  # its file's cells are not quoted
            raise DataError(f"there is no silo '{name}' in the silo set of {len(names)} silos")
        raise no_such_silo(name, names)
    pool = _open(data, settings, places)
    sets = label_sets(pool.classes, len(names), settings.unseen)
    cut = LabelCut(pool.labels, sets, names, pool.classes, f"{data.name}, partition 'unseen'")
    train_size = settings.silo_train_size or pool.train_size
    test_size = (settings.silo_test_size or pool.test_size) if settings.use_test else 0
    rows = cut.rows(train_size, test_size)[names.index(name)]
    listed = {part: rows[part].tolist() for part in SPLITS}
    facts = [_MAKER, name, pool.key, listed]

    def fill(folder: Path) -> None:
        parts = {part: pool.split(part, rows[part]) for part in SPLITS}
        save_silo(folder, parts, {"name": name, "distribution": UNSEEN, **pool.facts})

    return cached_silo(places.cache / f"{data.name}-unseen-silos", name, facts, pool.classes, fill)


@dataclass(frozen=True)
class _Pool:
    """All labelled images of a data set.

    Attributes:
        labels: part -> (n,).
        inputs: returns these rows of a part as networks take them.
        classes: number of labels.
        key: what decides the content.
        facts: what a silo's file says besides.
        train_size, test_size: images of a silo where the settings name none; 0: as many as can be.
    """

    labels: Mapping[str, Labels]
    inputs: Callable[[str, Rows], Tensor]
    classes: int
    key: Sequence[Any]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train_size: int = 0
    test_size: int = 0

    def split(self, part: str, rows: Rows) -> Split:
        """Return these rows; validation ones are of the training part if there is no other."""
        whence = "train" if part == "val" and not len(self.labels["val"]) else part
        labels = np.array(self.labels[whence][rows], dtype=np.int64)
        return Split(self.inputs(whence, rows), torch.from_numpy(labels))


def _open(data: DataSet, settings: CommonSettings, places: Places) -> _Pool:
    if isinstance(data, ShiftedImages):
        return _pool_of_source(data, settings, places)
    return _pool_of_silos(data, settings, places)


def _pool_of_source(data: ShiftedImages, settings: CommonSettings, places: Places) -> _Pool:
    """Return the images that the UEFL silos are cut from, as those of its D1: unrotated."""
    source = data.source
    pool, key = open_pool(source, places)
    images = {"train": pool.train_images, "val": pool.train_images, "test": pool.test_images}
    places_of = {"train": np.arange(len(pool.train_labels)), "val": np.empty(0, np.int64)}
    if pool.train_tracks is not None:
        places_of["train"], places_of["val"] = hold_out_tracks(pool.train_tracks, pool.train_labels)
    places_of["test"] = np.arange(len(pool.test_labels))

    def inputs(part: str, rows: Rows) -> Tensor:
        chosen = images[part][places_of[part][rows]]
        return scaled(shift(chosen, "D1", noise=False, key=""), source, settings)

    return _Pool(
        labels={
            "train": pool.train_labels[places_of["train"]],
            "val": pool.train_labels[places_of["val"]],
            "test": pool.test_labels,
        },
        inputs=inputs,
        classes=source.classes,
        key=[key, settings.pixel_scale],
        train_size=source.train_size,
        test_size=source.test_size,
    )


def _pool_of_silos(data: DataSet, settings: CommonSettings, places: Places) -> _Pool:
    """Return the images of all the data set's own silos, each in the part that it has there."""
    own = dataclasses.replace(
        settings,
        partition="own",
        data_dir=str(places.data or ""),
        cache_dir=str(places.cache),
    )
    silos = [data.load(name, own, places) for name in data.silo_names(own)]
    parts = {part: _Mixed([silo.splits()[part] for silo in silos]) for part in SPLITS}
    return _Pool(
        labels={part: mixed.labels() for part, mixed in parts.items()},
        inputs=lambda part, rows: parts[part].inputs(rows),
        classes=silos[0].task.classes,
        key=[[silo.name, silo.schema, silo.fingerprints] for silo in silos],
        facts={"classes": list(silos[0].classes), "schema": silos[0].schema},
    )


class _Mixed:
    """One part of several silos: of each label, images of all silos in turn by their numbers.

    So silos that are cut from it differ by their labels, and not by the hospital.
    """

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = splits
        labels = [split.labels.numpy() for split in splits]
        self._labels = np.concatenate(labels)
        self._silo = np.repeat(np.arange(len(splits)), [len(part) for part in labels])
        self._row = np.concatenate([np.arange(len(part)) for part in labels])
        place = np.concatenate([_place_in_label(part) for part in labels])
        self._order = np.lexsort((self._row, self._silo, place))

    def labels(self) -> Labels:
        """Return (n,) labels."""
        return self._labels[self._order]

    def inputs(self, rows: Rows) -> Tensor:
        """Return the images of ``rows``, (k, *input_shape)."""
        chosen = self._order[rows]
        shape = self.splits[0].inputs.shape[1:]
        inputs = torch.empty((len(chosen), *shape), dtype=self.splits[0].inputs.dtype)
        for silo, split in enumerate(self.splits):
            here = np.flatnonzero(self._silo[chosen] == silo)
            inputs[here] = split.inputs[self._row[chosen][here]]
        return inputs


def _place_in_label(labels: Labels) -> Labels:
    """Return how far along each sample is among those of its label, above 0 and below 1."""
    place = np.empty(len(labels))
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return place
