"""Partitions other than a data set's own: any number of silos cut from all of its samples.

``dirichlet`` and ``labels`` share out the samples of each label at random, by 'split.fold-seed'.
``unseen`` (FedEFM, section on unseen data) cuts images so that a share of each silo's labels is at
no other silo: at 1 the silos' label sets are disjoint, at 0 identical. A silo trains on its labels;
its validation and test images are of *all* labels, since the method is to recognise what only
others have seen. No sample is at two silos, each stays in the part (training, validation, test)
where the data set has it, and the run's seed decides nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.one_line import reason_of
from fedsilo.core.plugins import plug, wrong
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults, keys_with
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.partition.label_sets import LabelCut, Labels, Rows, label_sets
from fedsilo.datasets.partition.pool import CutPool, open_cut_pool
from fedsilo.datasets.partition.silo_sets import open_silo_set
from fedsilo.datasets.shifted.shifted import VALIDATION_SHARE, ShiftedImages
from fedsilo.datasets.silo.silos import SPLITS, DataSet, Silo, cached_silo, no_such_silo, save_silo

Shares = npt.NDArray[np.float64]


def dirichlet_shares(
    classes: int, silos: int, concentration: float, rng: np.random.Generator
) -> Shares:
    """Draw each label's shares of the silos, (classes, silos); the shares of a label sum to 1."""
    shares = rng.dirichlet(np.full(silos, concentration), classes)
    # Near concentration 0 all draws underflow, and numpy divides 0 by 0
    return np.nan_to_num(shares)


def label_shares(classes: int, silos: int, held: int, rng: np.random.Generator) -> Shares:
    """Draw each label's shares of the silos, (classes, silos), with ``held`` labels per silo.

    Labels are dealt out in turn, so that the numbers of silos of two labels differ by at most 1.

    Raises:
        SettingError: there are fewer labels, or some label would be at no silo.
    """
    if held > classes or held * silos < classes:
        raise SettingError(
            f"setting 'split.labels-per-silo' is {held}, and {silos} silos share {classes} labels: "
            f"it must be {-(-classes // silos)} to {classes}"
        )
    order, holds = rng.permutation(classes), np.zeros((classes, silos))
    for silo in range(silos):
        holds[order[np.arange(silo * held, (silo + 1) * held) % classes], silo] = 1
    shares: Shares = holds / holds.sum(axis=1, keepdims=True)
    return shares


def deal_rows(
    labels: Mapping[str, Labels], shares: Shares, rng: np.random.Generator
) -> list[dict[str, Rows]]:
    """Deal the rows of each split to the silos at random, by the shares of each label.

    Args:
        labels: split -> label of each row, (n,).
        shares: (classes, silos), see ``dirichlet_shares``.
        rng: decides which rows.

    Returns:
        For each silo: split -> rows, ascending.
    """
    found: list[dict[str, Rows]] = [{} for _ in range(shares.shape[1])]
    for part, of_part in labels.items():
        pieces = []  # pieces[label][silo] are rows
        for label, of_label in enumerate(shares):
            rows = rng.permutation(np.flatnonzero(of_part == label))
            # Edges of cumulated shares: every row goes to exactly one silo, whatever the rounding
            edges = np.rint(np.cumsum(of_label) * len(rows)).astype(int)
            pieces.append(np.split(rows, edges[:-1]))
        for own, of_silo in zip(found, zip(*pieces, strict=True), strict=True):
            own[part] = np.sort(np.concatenate(of_silo))
    return found


_KEYS = frozenset(keys_with(CommonSettings, "silo"))
UNSEEN, DIRICHLET, LABELS = "unseen", "dirichlet", "labels"
PARTITIONS = ("own", UNSEEN, DIRICHLET, LABELS)  # any other name is a plugin's
_OF = {"split.unseen": UNSEEN, "split.concentration": DIRICHLET, "split.labels-per-silo": LABELS}
_FEWEST = 2  # training samples of a silo, because batch norm has no variance over one
_MAKER = 1  # raise it when the same rows make other arrays, so that no old cache is read
# Rows of the last cut. Each silo of a run asks for the same cut, and only one is kept in memory
_last_rows: dict[str, list[dict[str, Rows]]] = {}


def is_cut(settings: CommonSettings) -> bool:
    """Tell whether silos are cut from all samples instead of being the data set's own."""
    return settings.partition != "own"


def cut_keys(partition: str) -> frozenset[str]:
    """Return the settings that a partition reads, in addition to those of the data set."""
    if partition == "own":
        return frozenset()
    return _KEYS if partition == UNSEEN else _KEYS | {"split.fold-seed"}


def check_partition(data: DataSet, settings: CommonSettings) -> None:
    """Refuse an impossible partition before anything is read.

    Raises:
        SettingError: a setting is of another partition, 'split.unseen' is impossible with the data
            set's labels or a table, or 'split.silos' contradicts 'split.silo-set'.
        DataError: the silo set cannot be read.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    for key, partition in _OF.items():
        if values[key] != usual[key] and settings.partition != partition:
            raise SettingError(
                f"setting '{key}' has no effect without partition '{partition}': remove it, or set "
                f"'split.partition' to '{partition}'"
            )
    if not is_cut(settings):
        return
    if settings.partition not in PARTITIONS:
        _partitioner(settings)
    _refuse_table(data, settings)
    silos = len(cut_names(settings))
    classes = _known_classes(data, settings) if settings.partition == UNSEEN else None
    if classes is not None:
        label_sets(classes, silos, settings.unseen)


def _refuse_table(data: DataSet, settings: CommonSettings) -> None:
    if data.is_table and settings.partition == UNSEEN:
        raise SettingError(
            f"data set '{data.name}' is a table, and partition 'unseen' cuts images by label: "
            "choose another data set, or set 'split.partition' to 'own'"
        )


def _known_classes(data: DataSet, settings: CommonSettings) -> int | None:
    """Return the number of labels, or None if only the data files tell it."""
    if isinstance(data, ShiftedImages):
        return data.source.classes
    if not isinstance(data, ImageDataSet):
        return None
    try:
        return len(data.classes(settings, find_places(settings.data_dir, settings.cache_dir)))
    except DataError:  # the server of a deployment has no data
        return None


def cut_names(settings: CommonSettings) -> list[str]:
    """Return the silo set's names if one is set, else silo-1, silo-2, ..., all of one length.

    Raises:
        SettingError: 'split.silos' is neither its default nor the number of silos in the set.
        DataError: the silo set cannot be read.
    """
    if not settings.silo_set:
        digits = len(str(settings.silos))
        return [f"silo-{number:0{digits}}" for number in range(1, settings.silos + 1)]
    names = list(open_silo_set(settings.silo_set).names)
    if settings.silos not in (CommonSettings().silos, len(names)):
        raise SettingError(
            f"setting 'split.silos' is {settings.silos}, and silo set '{settings.silo_set}' has "
            f"{len(names)} silos: remove it"
        )
    return names


def load_cut(data: DataSet, name: str, settings: CommonSettings, places: Places) -> Silo:
    """Return the silo ``name`` that is cut from all samples of ``data``, cached.

    Raises:
        SettingError: the partition is impossible with its labels, or with a table.
        DataError: there is no such silo, data are missing or unusable, or too few.
    """
    _refuse_table(data, settings)
    names = cut_names(settings)
    if name not in names:
        if settings.silo_set:  # its file's cells are not quoted
            raise DataError(f"there is no silo '{name}' in the silo set of {len(names)} silos")
        raise no_such_silo(name, names)
    pool = open_cut_pool(data, settings, places)
    rows = _rows(data, pool, settings, names)[names.index(name)]
    facts = [_MAKER, name, pool.key, {part: rows[part].tolist() for part in SPLITS}]

    def fill(folder: Path) -> None:
        parts = {part: pool.split(part, rows[part]) for part in SPLITS}
        save_silo(folder, parts, {"name": name, "distribution": settings.partition, **pool.facts})

    folder = places.cache / f"{data.name}-{settings.partition.replace(':', '-')}-silos"
    return cached_silo(folder, name, facts, pool.classes, fill)


def cut_document(data: DataSet, settings: CommonSettings, places: Places) -> dict[str, Any]:
    """Describe a cut: its settings, each silo's rows of the pool, and a SHA-256 of the rows.

    Raises:
        SettingError, DataError: as of ``load_cut``.
    """
    names = cut_names(settings)
    rows = _rows(data, open_cut_pool(data, settings, places), settings, names)
    silos = {
        name: {part: own[part].tolist() for part in SPLITS}
        for name, own in zip(names, rows, strict=True)
    }
    decisive = sorted(["split.partition", *_OF, "split.fold-seed", *_KEYS])
    decided_by = {key: as_mapping(settings)[key] for key in decisive}
    return {"decided-by": decided_by, "sha256": json_digest(silos), "silos": silos}


def _rows(
    data: DataSet, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Return each silo's rows; 'val' rows are training rows if the pool has no validation part."""
    if settings.partition not in PARTITIONS:  # a plug may deal otherwise under the same settings
        return _shared_rows(data.name, pool, settings, names)
    key = json_digest([data.name, pool.key, as_mapping(settings), names])
    rows = _last_rows.get(key)
    if rows is None:
        deal = _unseen_rows if settings.partition == UNSEEN else _shared_rows
        rows = deal(data.name, pool, settings, names)
        _last_rows.clear()
        _last_rows[key] = rows
    return rows


def _unseen_rows(
    dataset: str, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Give each silo rows of its own labels."""
    sets = label_sets(pool.classes, len(names), settings.unseen)
    cut = LabelCut(pool.labels, sets, names, pool.classes, f"{dataset}, partition 'unseen'")
    test_size = settings.silo_test_size or pool.test_size if settings.use_test else 0
    return cut.rows(settings.silo_train_size or pool.train_size, test_size)


def _shared_rows(
    dataset: str, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Share out the rows of each label at random."""
    rng = np.random.default_rng(derive_seed(settings.fold_seed, "partition", settings.partition))
    if settings.partition == DIRICHLET:
        shares = dirichlet_shares(pool.classes, len(names), settings.concentration, rng)
        cut = deal_rows(pool.labels, shares, rng)
    elif settings.partition == LABELS:
        shares = label_shares(pool.classes, len(names), settings.labels_per_silo, rng)
        cut = deal_rows(pool.labels, shares, rng)
    else:
        cut = _plugged_rows(pool.labels, len(names), settings, rng)
    test_size = settings.silo_test_size if settings.use_test else 0
    for own in cut:
        own["train"] = _some(own["train"], settings.silo_train_size, rng)
        own["test"] = _some(own["test"], test_size, rng) if settings.use_test else own["test"][:0]
        if not len(pool.labels["val"]):
            held_out = _some(own["train"], len(own["train"]) // VALIDATION_SHARE or -1, rng)
            own["val"], own["train"] = held_out, np.setdiff1d(own["train"], held_out)
    short = [name for name, own in zip(names, cut, strict=True) if len(own["train"]) < _FEWEST]
    if short:
        advice = "lower 'split.silos', or set another 'split.fold-seed'"
        if 0 < settings.silo_train_size < _FEWEST:
            advice = f"raise 'split.silo-train-size' to at least {_FEWEST}"
        elif settings.partition == DIRICHLET:
            advice = (
                "raise 'split.concentration', lower 'split.silos', or set another 'split.fold-seed'"
            )
        raise DataError(
            f"{dataset}, partition '{settings.partition}' leaves {len(short)} of {len(names)} "
            f"silos without {_FEWEST} training samples, '{short[0]}' first: {advice}"
        )
    return cut


def _partitioner(settings: CommonSettings) -> Callable[..., Any]:
    found = plug("partition", settings.partition, PARTITIONS)
    if not callable(found):
        raise wrong("partition", settings.partition, found, "function (labels, silos, rng)")
    return cast(Callable[..., Any], found)


def _plugged_rows(
    labels: Mapping[str, Labels], silos: int, settings: CommonSettings, rng: np.random.Generator
) -> list[dict[str, Rows]]:
    """Let a plugin deal the rows of each split, whose labels it gets as (n,).

    Returns:
        For each silo: split -> rows, ascending.

    Raises:
        SettingError: the plugin fails, or does not return rows, each at one silo at most.
    """
    name, partitioner = settings.partition, _partitioner(settings)
    try:
        given = partitioner({part: of_part.copy() for part, of_part in labels.items()}, silos, rng)
        cut = [{part: np.asarray(own.get(part, ())) for part in labels} for own in given]
        fits = len(cut) == silos and all(
            _is_once([own[part] for own in cut if own[part].size], len(of_part))
            for part, of_part in labels.items()
        )
    except Exception as error:  # it is anybody's code
        raise SettingError(f"partition '{name}' fails ({reason_of(error)})") from None
    if not fits:
        raise SettingError(
            f"partition '{name}' must return, for each of {silos} silos, a mapping of part (train, "
            "val, test) to numbers of rows, of which none is at two silos"
        )
    return [{part: np.sort(own[part]).astype(np.int64) for part in labels} for own in cut]


def _is_once(rows: list[Rows], count: int) -> bool:
    """Tell whether all ``rows`` together are whole numbers in 0..count-1, each at most once."""
    if not rows:
        return True
    found = np.concatenate(rows)
    whole = found.ndim == 1 and np.issubdtype(found.dtype, np.integer)
    return whole and len(np.unique(found)) == len(found) and 0 <= found.min() <= found.max() < count


def _some(rows: Rows, count: int, rng: np.random.Generator) -> Rows:
    """Draw ``count`` of ``rows``, ascending; all rows for 0, no rows for a negative number."""
    if count < 0:
        return rows[:0]
    return rows if not count or count >= len(rows) else np.sort(rng.permutation(rows)[:count])
