"""Partition ``unseen``: silos cut by label, a share of each silo's labels at no other silo.

FedEFM (section on unseen data): at 1 the silos' label sets are disjoint, at 0 identical. Images of
all sites are pooled, each in its own part, and no image is at two silos. A silo trains on the
labels that it holds. Its validation and test images are of *all* labels, since the method is to
recognise what only others have seen, and settings are to be chosen on what is reported; they differ
from silo to silo. The run's seed decides none of it.
"""

from __future__ import annotations

from pathlib import Path

from fedsilo.datasets.images.dataset import ImageDataSet
from fedsilo.datasets.io.locations import Places, find_places
from fedsilo.datasets.partition.label_sets import LabelCut, label_sets
from fedsilo.datasets.partition.pool import open_cut_pool
from fedsilo.datasets.partition.silo_sets import open_silo_set
from fedsilo.datasets.shifted.shifted import ShiftedImages
from fedsilo.datasets.silo.cache import cached_silo
from fedsilo.datasets.silo.silos import SPLITS, DataSet, Silo, no_such_silo, save_silo
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.settings import CommonSettings

UNSEEN = "unseen"  # the partition, and the distribution of its silos

_MAKER = 1  # raise it when the same rows make other arrays, so that no old cache is read


def check_unseen(data: DataSet, settings: CommonSettings) -> None:
    """Refuse a share that cannot be, before anything is read.

    Raises:
        SettingError: it is impossible with the labels that there are, the data set is a table, or
            'silos' contradicts 'silo-set'.
        DataError: the silo set cannot be read.
    """
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
    pool = open_cut_pool(data, settings, places)
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
