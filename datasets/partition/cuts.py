"""Partitions other than a data set's own: any number of silos cut from all of its samples.

``unseen``, ``dirichlet`` and ``labels`` are of labelled images; the latter two also of tables. What
a cut has dealt out is decided by 'fold-seed' and by no run's seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.partition.label_sets import Rows
from fedsilo.datasets.partition.label_skew import dealt, dirichlet_shares, label_shares
from fedsilo.datasets.partition.pool import CutPool, open_cut_pool
from fedsilo.datasets.partition.unseen import UNSEEN, check_unseen, load_unseen, unseen_names
from fedsilo.datasets.shifted.shifted import VALIDATION_SHARE
from fedsilo.datasets.silo.cache import cached_silo
from fedsilo.datasets.silo.silos import SPLITS, DataSet, Silo, no_such_silo, save_silo
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.seeding import derive_seed
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, defaults, keys_with

_KEYS = frozenset(keys_with(CommonSettings, "silo"))
DIRICHLET, LABELS = "dirichlet", "labels"
_OF = {"unseen": UNSEEN, "concentration": DIRICHLET, "labels-per-silo": LABELS}
_FEWEST = 2  # training samples: batch norm has no spread of one
_MAKER = 1  # raise it when the same rows make other arrays, so that no old cache is read


def is_cut(settings: CommonSettings) -> bool:
    """Tell whether silos are cut anew, and not those of the data set."""
    return settings.partition != "own"


def cut_keys(partition: str) -> frozenset[str]:
    """Return the settings that are read under a partition, whatever the data set reads itself."""
    if partition == "own":
        return frozenset()
    return _KEYS | {"fold-seed"} if partition in (DIRICHLET, LABELS) else _KEYS


def check_partition(data: DataSet, settings: CommonSettings) -> None:
    """Refuse a partition that cannot be, before anything is read.

    Raises:
        SettingError: a setting is of another partition, or as ``check_unseen`` says.
        DataError: the silo set cannot be read.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    for key, partition in _OF.items():
        if values[key] != usual[key] and settings.partition != partition:
            raise SettingError(
                f"setting '{key}' means nothing without partition '{partition}': remove it, or set "
                f"'partition' to '{partition}'"
            )
    if settings.partition == UNSEEN:
        check_unseen(data, settings)
    elif is_cut(settings):
        unseen_names(settings)


def cut_names(settings: CommonSettings) -> list[str]:
    """Return the silos' names; errors of ``unseen_names``."""
    return unseen_names(settings)


def load_cut(data: DataSet, name: str, settings: CommonSettings, places: Places) -> Silo:
    """Return the silo ``name`` of all data of ``data``, from the cache or cut now.

    Raises:
        SettingError: the partition is impossible with its labels.
        DataError: there is no such silo, data are missing or unusable, or too few.
    """
    if settings.partition == UNSEEN:
        return load_unseen(data, name, settings, places)
    names = cut_names(settings)
    if name not in names:
        raise no_such_silo(name, names)
    pool = open_cut_pool(data, settings, places)
    rows = _rows(data, pool, settings, names)[names.index(name)]
    facts = [_MAKER, name, pool.key, {part: rows[part].tolist() for part in SPLITS}]

    def fill(folder: Path) -> None:
        parts = {part: pool.split(part, rows[part]) for part in SPLITS}
        save_silo(folder, parts, {"name": name, "distribution": settings.partition, **pool.facts})

    folder = places.cache / f"{data.name}-{settings.partition}-silos"
    return cached_silo(folder, name, facts, pool.classes, fill)


def cut_document(data: DataSet, settings: CommonSettings, places: Places) -> dict[str, Any]:
    """Return what decided a cut, whose rows of the pool went to which silo, and their SHA-256.

    Raises:
        SettingError, DataError: as of ``load_cut``.
    """
    names = cut_names(settings)
    pool = open_cut_pool(data, settings, places)
    rows = _rows(data, pool, settings, names)
    silos = {
        name: {part: own[part].tolist() for part in SPLITS}
        for name, own in zip(names, rows, strict=True)
    }
    decisive = sorted(["partition", *_OF, "fold-seed", *_KEYS])
    decided_by = {key: as_mapping(settings)[key] for key in decisive}
    return {"decided-by": decided_by, "sha256": json_digest(silos), "silos": silos}


def _rows(
    data: DataSet, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Return each silo's rows; those of part 'val' are training rows if the pool has no other."""
    draw = np.random.default_rng(derive_seed(settings.fold_seed, "partition", settings.partition))
    if settings.partition == DIRICHLET:
        shares = dirichlet_shares(pool.classes, len(names), settings.concentration, draw)
    else:
        shares = label_shares(pool.classes, len(names), settings.labels_per_silo, draw)
    cut = dealt(pool.labels, shares, draw)
    test_size = settings.silo_test_size if settings.use_test else 0
    for own in cut:
        own["train"] = _some(own["train"], settings.silo_train_size, draw)
        own["test"] = _some(own["test"], test_size, draw) if settings.use_test else own["test"][:0]
        if not len(pool.labels["val"]):
            held_out = _some(own["train"], len(own["train"]) // VALIDATION_SHARE or -1, draw)
            own["val"], own["train"] = held_out, np.setdiff1d(own["train"], held_out)
    short = [name for name, own in zip(names, cut, strict=True) if len(own["train"]) < _FEWEST]
    if short:
        raise DataError(
            f"{data.name}, partition '{settings.partition}' leaves {len(short)} of {len(names)} "
            f"silos without {_FEWEST} training samples, '{short[0]}' first: {_mend(settings)}"
        )
    return cut


def _mend(settings: CommonSettings) -> str:
    if 0 < settings.silo_train_size < _FEWEST:
        return f"raise 'silo-train-size' to at least {_FEWEST}"
    if settings.partition == DIRICHLET:
        return "raise 'concentration', lower 'silos', or set another 'fold-seed'"
    return "lower 'silos', or set another 'fold-seed'"


def _some(rows: Rows, count: int, draw: np.random.Generator) -> Rows:
    """Return ``count`` of ``rows`` at random, ascending; all for 0, none for less."""
    if count < 0:
        return rows[:0]
    return rows if not count or count >= len(rows) else np.sort(draw.permutation(rows)[:count])
