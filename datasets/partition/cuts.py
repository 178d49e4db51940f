"""Cut any number of silos from all samples of a data set, for partitions other than 'own'.

``dirichlet`` and ``labels`` share out the samples of each label at random, seeded by
'split.fold-seed'. ``unseen`` (FedEFM, section on unseen data) cuts images so that a given share of
each silo's labels is at no other silo: at 1 the silos' label sets are disjoint, at 0 identical.
Under ``unseen`` a silo trains only on its own labels, but validates and tests on *all* labels,
because the method should recognise what only other silos have seen. No sample is at two silos, and
each stays in the part (train, val, test) that the data set gives it. The run's seed decides
nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places, find_places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.one_line import reason_of
from fedsilo.core.plugins import resolve_plugin, wrong_plugin
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
    """Draw for each label the shares of the silos, from a symmetric Dirichlet distribution.

    Returns:
        Shares (classes, silos), in which each row sums to 1. Near a ``concentration`` of 0, all
        draws for a label may underflow. One random silo then gets all samples of the label.
    """
    shares = rng.dirichlet(np.full(silos, concentration), classes)
    # Near concentration 0 all draws underflow, and numpy divides 0 by 0. The limit of the
    # distribution at 0 gives the whole label to one silo
    for label in np.flatnonzero(~np.isfinite(shares).all(axis=1)):
        shares[label] = 0.0
        shares[label, rng.integers(silos)] = 1.0
    return shares


def label_shares(classes: int, silos: int, per_silo: int, rng: np.random.Generator) -> Shares:
    """Choose ``per_silo`` random labels per silo, and divide each label equally among its silos.

    The labels are put into a random order. The first silo takes the first ``per_silo`` labels, the
    next silo the labels that follow, and so on. After the last label, the same order starts again.
    The number of silos per label therefore differs by at most 1.

    Returns:
        Shares (classes, silos), in which each row sums to 1.

    Raises:
        SettingError: ``per_silo`` is above the number of labels, or so small that a label would
            have no silo.
    """
    if per_silo > classes or per_silo * silos < classes:
        raise SettingError(
            f"'split.labels-per-silo' must be {math.ceil(classes / silos)} to {classes}, because "
            f"{silos} silos share {classes} labels, but is {per_silo}"
        )
    # Silos take ``per_silo`` labels each in turn from this random order, over and over. So each
    # label is taken floor or ceil of silos * per_silo / classes times
    order = rng.permutation(classes)
    holds = np.zeros((classes, silos))
    for silo in range(silos):
        turns = np.arange(silo * per_silo, (silo + 1) * per_silo) % classes
        holds[order[turns], silo] = 1
    shares: Shares = holds / holds.sum(axis=1, keepdims=True)
    return shares


def deal_rows(
    labels: Mapping[str, Labels], shares: Shares, rng: np.random.Generator
) -> list[dict[str, Rows]]:
    """Deal the rows of each split to the silos at random, by each silo's share of each label.

    Args:
        labels: split -> label of each row, (n,).
        shares: (classes, silos). Entry [label, silo] is the silo's share of the label's rows. Each
            row of the array sums to 1.
        rng: the random generator that shuffles the rows.

    Returns:
        For each silo, a dictionary: split -> row indices, ascending. Shares are rounded to whole
        rows, and every row is at exactly one silo.
    """
    silos: list[dict[str, Rows]] = [{} for _ in range(shares.shape[1])]
    for part, labels_of_part in labels.items():
        # Silo -> its rows of each label, in the order of the labels
        pieces: list[list[Rows]] = [[] for _ in silos]
        for label, shares_of_label in enumerate(shares):
            rows = rng.permutation(np.flatnonzero(labels_of_part == label))
            # Edges of cumulated shares: every row goes to exactly one silo, whatever the rounding
            edges = np.rint(np.cumsum(shares_of_label) * len(rows)).astype(int)
            for place, piece in enumerate(np.split(rows, edges[:-1])):
                pieces[place].append(piece)
        for place, silo in enumerate(silos):
            silo[part] = np.sort(np.concatenate(pieces[place]))
    return silos


_KEYS = frozenset(keys_with(CommonSettings, "silo"))
UNSEEN, DIRICHLET, LABELS = "unseen", "dirichlet", "labels"
PARTITIONS = ("own", UNSEEN, DIRICHLET, LABELS)  # any other name is a plugin's
_OF = {"split.unseen": UNSEEN, "split.concentration": DIRICHLET, "split.labels-per-silo": LABELS}
_FEWEST = 2  # training samples of a silo, because batch norm has no variance over one
_MAKER = 1  # raise it when the same rows make other arrays, so that no old cache is read
# Rows of the last cut. Each silo of a run needs the same cut, and only one is kept in memory
_last_rows: dict[str, list[dict[str, Rows]]] = {}


def is_cut(settings: CommonSettings) -> bool:
    """Tell whether silos are cut from all samples, as with every partition but 'own'."""
    return settings.partition != "own"


def cut_keys(partition: str) -> frozenset[str]:
    """Return the keys of the settings that decide how a partition cuts silos.

    A cut makes silos from all samples of a data set. The keys are 'split.silos',
    'split.silo-train-size' and 'split.silo-test-size'. For random partitions, which are all but
    'unseen', 'split.fold-seed' is added. Settings of a single partition, such as
    'split.concentration', are not included. The set is empty for 'own', which keeps the data set's
    silos.
    """
    if partition == "own":
        return frozenset()
    if partition == UNSEEN:  # nothing in it is random
        return _KEYS
    return _KEYS | {"split.fold-seed"}


def check_partition(data: DataSet, settings: CommonSettings) -> None:
    """Check, as far as possible without loading samples, that the run's partition is possible.

    A partition decides how silos are cut from all samples of the data set. The partition 'own'
    keeps the data set's silos.

    Raises:
        SettingError: one of these faults is found:

            - A setting that only another partition uses was changed from its default.
            - The plugin that the partition names is missing, or is not a function.
            - The partition is 'unseen' and the data set is a table.
            - The partition is 'unseen', and the classes cannot be divided so that each silo has
              about the share 'split.unseen' of classes that no other silo has.
            - 'split.silos' is neither its default nor the number of silos in 'split.silo-set'.
        DataError: the silo set (the file that names the silos) cannot be read.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    for key, partition in _OF.items():
        if values[key] != usual[key] and settings.partition != partition:
            raise SettingError(
                f"'{key}' has no effect without partition '{partition}': remove it, or set "
                f"'split.partition' to '{partition}'"
            )
    if not is_cut(settings):
        return
    if settings.partition not in PARTITIONS:
        _partitioner(settings)
    _refuse_table(data, settings)
    silos = len(cut_names(settings))
    if settings.partition == UNSEEN:
        classes = _known_classes(data, settings)
        if classes is not None:
            label_sets(classes, silos, settings.unseen)


def _refuse_table(data: DataSet, settings: CommonSettings) -> None:
    if data.is_table and settings.partition == UNSEEN:
        raise SettingError(
            f"partition 'unseen' cuts images by label, but data set '{data.name}' is a table: "
            "choose another data set, or set 'split.partition' to 'own'"
        )


def _known_classes(data: DataSet, settings: CommonSettings) -> int | None:
    """Return the number of classes of an image data set, or None if this machine cannot tell.

    ``ShiftedImages`` know their number. For other image data sets the files decide, and the result
    is None if they are missing or unusable, for example on a server. A data set without images
    gives None.
    """
    if isinstance(data, ShiftedImages):
        return data.source.classes
    if not isinstance(data, ImageDataSet):
        return None
    try:
        return len(data.classes(settings, find_places(settings.data_dir, settings.cache_dir)))
    except DataError:  # the server of a deployment has no data
        return None


def cut_names(settings: CommonSettings) -> list[str]:
    """Return the names of the silos into which a partition divides a data set, in order.

    If the setting 'split.silo-set' names a set of silos and their links, the result has the names
    of all silos in the set. Otherwise there are as many names as 'split.silos' says: silo-1, silo-2
    and so on, with leading zeros so that all are equally long.

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
            f"'split.silos' is {settings.silos}, but silo set '{settings.silo_set}' has "
            f"{len(names)} silos: remove 'split.silos'"
        )
    return names


def load_cut(data: DataSet, name: str, settings: CommonSettings, places: Places) -> Silo:
    """Load a silo that the run's partition cuts from all samples of a data set.

    The samples of all silos are chosen, but only the silo ``name`` is loaded. If the cache lacks
    the silo, it is written there first.

    Raises:
        SettingError: the partition is impossible with this data set, its plugin is missing or
            fails, or 'split.silos' contradicts the silo set.
        DataError: no silo has this name, the data or the silo set cannot be used, or there are too
            few samples.
    """
    _refuse_table(data, settings)
    names = cut_names(settings)
    if name not in names:
        if settings.silo_set:  # its file's cells are not quoted
            raise DataError(
                f"the silo set has {len(names)} silos, but no silo '{name}': correct the name"
            )
        raise no_such_silo(name, names)
    pool = open_cut_pool(data, settings, places)
    rows = _cut_all(data, pool, settings, names)[names.index(name)]
    # The rows themselves are in the key, so it does not matter which settings chose them
    facts = [_MAKER, name, pool.key, _as_lists(rows)]

    def fill(folder: Path) -> None:
        parts = {}
        for part in SPLITS:
            parts[part] = pool.split(part, rows[part])
        save_silo(folder, parts, {"name": name, "distribution": settings.partition, **pool.facts})

    folder = places.cache / f"{data.name}-{settings.partition.replace(':', '-')}-silos"
    return cached_silo(folder, name, facts, pool.classes, fill)


def cut_document(data: DataSet, settings: CommonSettings, places: Places) -> dict[str, Any]:
    """Record which samples a partition gives to each silo, so that the cut can be repeated.

    Row indices count from 0 within a split of the whole data set. If the data set has no validation
    split, the 'val' rows are rows of its training split.

    Returns:
        A dictionary with the keys 'decided-by' (the settings that decide the cut: key -> value),
        'silos' (silo -> split -> row indices) and 'sha256' (a digest of 'silos').

    Raises:
        SettingError: the partition is impossible with the data set's labels, its plugin is missing
            or fails, or 'split.silos' contradicts the silo set.
        DataError: the data or the silo set are missing or unusable, or there are too few samples.
    """
    names = cut_names(settings)
    rows = _cut_all(data, open_cut_pool(data, settings, places), settings, names)
    silos = {}
    for name, own in zip(names, rows, strict=True):
        silos[name] = _as_lists(own)
    values = as_mapping(settings)
    # Not all settings, only those that can change a row's silo
    decided_by = {}
    for key in sorted(["split.partition", *_OF, "split.fold-seed", *_KEYS]):
        decided_by[key] = values[key]
    return {"decided-by": decided_by, "sha256": json_digest(silos), "silos": silos}


def _as_lists(rows: Mapping[str, Rows]) -> dict[str, list[int]]:
    """Convert the rows of each split to a list, which JSON can hold."""
    return {part: rows[part].tolist() for part in SPLITS}


def _cut_all(
    data: DataSet, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Choose the rows of every silo for the run's partition, or reuse the rows of the last call.

    The pool is all samples of the data set. The rows are reused if data set, pool, settings and
    names are equal to those of the last call. Only a plugin's partition is always computed again.
    ``names`` are the silos' names, in the order of the result.

    Returns:
        One dictionary per silo: split -> rows, ascending. If the pool has no validation part, 'val'
        rows refer to its training part.

    Raises:
        SettingError: the partition is impossible with these labels, or the plugin fails.
        DataError: the pool has too few samples.
    """
    if settings.partition not in PARTITIONS:  # a plugin may change under the same settings
        return _cut_at_random(data.name, pool, settings, names)
    key = json_digest([data.name, pool.key, as_mapping(settings), names])
    if key not in _last_rows:
        if settings.partition == UNSEEN:
            rows = _cut_unseen(data.name, pool, settings, names)
        else:
            rows = _cut_at_random(data.name, pool, settings, names)
        _last_rows.clear()
        _last_rows[key] = rows
    return _last_rows[key]


def _cut_unseen(
    dataset: str, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Choose every silo's rows for the partition 'unseen', in which silos have private labels.

    A private label is in the training rows of only one silo. 'split.silo-train-size' and
    'split.silo-test-size' set the sizes. If a setting is 0, the pool's ``train_size`` or
    ``test_size`` applies. If that is 0 too, silos are as large as possible.

    Args:
        dataset: the data set's name, for errors.
        pool: all samples of the data set.
        settings: the wanted share of private labels ('split.unseen'), and the sizes.
        names: the silos' names.

    Returns:
        For each silo, part -> rows, ascending. The test rows are empty if 'split.use-test' is
        false.

    Raises:
        SettingError: no division of the labels gives the wanted share.
        DataError: the pool has too few samples for the sizes.
    """
    sets = label_sets(pool.classes, len(names), settings.unseen)
    cut = LabelCut(pool.labels, sets, names, pool.classes, f"{dataset}, partition 'unseen'")
    train_size = settings.silo_train_size or pool.train_size
    test_size = 0
    if settings.use_test:
        test_size = settings.silo_test_size or pool.test_size
    return cut.rows(train_size, test_size)


def _cut_at_random(
    dataset: str, pool: CutPool, settings: CommonSettings, names: list[str]
) -> list[dict[str, Rows]]:
    """Choose the rows of every silo for the partition 'dirichlet', 'labels' or a plugin.

    'split.fold-seed' seeds the random numbers. A silo with more rows than 'split.silo-train-size'
    or 'split.silo-test-size' keeps only that number of random rows. A size of 0 keeps all. If the
    pool has no validation part, a random tenth of a silo's training rows, rounded down, becomes its
    validation rows.

    Args:
        dataset: the data set's name, for errors.
        pool: all samples of the data set.
        settings: the partition, its settings and the sizes. If 'split.use-test' is false, test rows
            are empty.
        names: the silos' names.

    Returns:
        For each silo, part -> rows, ascending.

    Raises:
        SettingError: 'split.labels-per-silo' does not fit the number of labels, or the plugin is
            missing or fails.
        DataError: a silo gets fewer than two training samples.
    """
    rng = np.random.default_rng(derive_seed(settings.fold_seed, "partition", settings.partition))
    if settings.partition == DIRICHLET:
        shares = dirichlet_shares(pool.classes, len(names), settings.concentration, rng)
        cut = deal_rows(pool.labels, shares, rng)
    elif settings.partition == LABELS:
        shares = label_shares(pool.classes, len(names), settings.labels_per_silo, rng)
        cut = deal_rows(pool.labels, shares, rng)
    else:
        cut = _cut_by_plugin(pool.labels, len(names), settings, rng)
    has_validation = len(pool.labels["val"]) > 0
    # The order of the draws decides which rows a silo gets: train, test, val, silo by silo
    for own in cut:
        own["train"] = _draw(own["train"], settings.silo_train_size or None, rng)
        if settings.use_test:
            own["test"] = _draw(own["test"], settings.silo_test_size or None, rng)
        else:
            own["test"] = own["test"][:0]
        if not has_validation:
            own["val"] = _draw(own["train"], len(own["train"]) // VALIDATION_SHARE, rng)
            own["train"] = np.setdiff1d(own["train"], own["val"])
    _refuse_small_silos(dataset, settings, names, cut)
    return cut


def _refuse_small_silos(
    dataset: str, settings: CommonSettings, names: Sequence[str], cut: Sequence[Mapping[str, Rows]]
) -> None:
    """Check that each silo has at least two training samples, because batch norm needs two.

    Validation and test parts may be empty. ``cut`` has each silo's rows: part -> rows.

    Raises:
        DataError: a silo has fewer than two training samples. The error counts such silos, names
            the first, and advises a change of settings.
    """
    small = []
    for name, own in zip(names, cut, strict=True):
        if len(own["train"]) < _FEWEST:
            small.append(name)
    if not small:
        return
    advice = "lower 'split.silos', or set another 'split.fold-seed'"
    if 0 < settings.silo_train_size < _FEWEST:
        advice = f"raise 'split.silo-train-size' to at least {_FEWEST}"
    elif settings.partition == DIRICHLET:
        advice = (
            "raise 'split.concentration', lower 'split.silos', or set another 'split.fold-seed'"
        )
    raise DataError(
        f"{dataset}, partition '{settings.partition}' leaves {len(small)} of {len(names)} silos "
        f"without {_FEWEST} training samples, '{small[0]}' first: {advice}"
    )


def _partitioner(settings: CommonSettings) -> Callable[..., Any]:
    found = resolve_plugin("partition", settings.partition, PARTITIONS)
    if not callable(found):
        raise wrong_plugin("partition", settings.partition, found, "function (labels, silos, rng)")
    return cast(Callable[..., Any], found)


def _cut_by_plugin(
    labels: Mapping[str, Labels], silos: int, settings: CommonSettings, rng: np.random.Generator
) -> list[dict[str, Rows]]:
    """Call a plugin that assigns the rows to silos, and check its answer.

    Args:
        labels: split -> label of each row, (n,). The plugin gets a copy.
        silos: the number of silos.
        settings: 'split.partition' names the plugin.
        rng: the random generator that the plugin may use.

    Returns:
        One dictionary per silo: split -> rows, ascending. A split that the plugin omits is empty,
        and some rows may belong to no silo.

    Raises:
        SettingError: the plugin raises any exception, or returns another number of silos, an
            invalid row index, or the same row twice, at one silo or at two.
    """
    name = settings.partition
    partitioner = _partitioner(settings)
    # A copy, because a plugin that writes into the labels would change the pool
    copies = {part: of_part.copy() for part, of_part in labels.items()}
    try:
        cut = []
        for own in partitioner(copies, silos, rng):
            cut.append({part: np.asarray(own.get(part, ())) for part in labels})
        is_valid = len(cut) == silos
        for part, of_part in labels.items():
            is_valid = is_valid and _are_distinct([own[part] for own in cut], len(of_part))
    except Exception as error:  # it is anybody's code
        raise SettingError(
            f"partition '{name}' fails ({reason_of(error)}): correct the plugin"
        ) from None
    if not is_valid:
        raise SettingError(
            f"partition '{name}' must return, for each of {silos} silos, a mapping of part (train, "
            "val, test) to row numbers, with no row at two silos: correct the plugin"
        )
    for own in cut:
        for part in labels:
            own[part] = np.sort(own[part]).astype(np.int64)
    return cut


def _are_distinct(rows: Sequence[Rows], count: int) -> bool:
    """Tell whether the arrays in ``rows`` contain only integers from 0 to ``count`` - 1, each once.

    A number in two arrays counts as twice. Empty arrays are ignored, and without any row the answer
    is True.
    """
    # An empty list becomes an array of floats, which would make all numbers floats
    filled = [own for own in rows if own.size]
    if not filled:
        return True
    numbers = np.concatenate(filled)
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        return False
    is_unique = len(np.unique(numbers)) == len(numbers)
    return is_unique and bool(0 <= numbers.min() <= numbers.max() < count)


def _draw(rows: Rows, count: int | None, rng: np.random.Generator) -> Rows:
    """Draw ``count`` of ``rows`` at random, without replacement and in ascending order.

    If ``count`` is None, or if there are at most ``count`` rows, ``rows`` is returned unchanged.
    Nothing is then drawn from ``rng``.
    """
    if count is None or count >= len(rows):
        return rows
    if count == 0:
        return rows[:0]
    return np.sort(rng.permutation(rows)[:count])
