"""Collect all samples of a data set in one pool, to cut silos from it.

The pool of a UEFL image set is its public source, not rotated. Other pools join the samples of the
data set's own silos, each in its own part, so that test images and their patients stay test data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.partition.label_sets import Labels, Rows
from fedsilo.datasets.shifted.pools import hold_out_tracks, open_pool
from fedsilo.datasets.shifted.shifted import ShiftedImages, scale_pixels, shift
from fedsilo.datasets.silo.silos import SPLITS, DataSet, Silo, Split

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CutPool:
    """All samples of a data set, by part.

    Attributes:
        labels: part -> label of each sample, (n,).
        inputs: function of (part, rows) that returns inputs as a silo holds them, (k,
            *input_shape).
        classes: number of labels.
        key: JSON facts that decide the content.
        facts: further facts to write into a silo's file.
        train_size, test_size: samples per silo unless the settings name them; 0 for as many as
            possible.
    """

    labels: Mapping[str, Labels]
    inputs: Callable[[str, Rows], Tensor]
    classes: int
    key: Sequence[Any]
    facts: Mapping[str, Any]
    train_size: int = 0
    test_size: int = 0

    def split(self, part: str, rows: Rows) -> Split:
        """Return the samples of a part at the row indices ``rows``, in that order, as a split.

        If the pool has no validation part, rows of 'val' are taken from the training part.
        """
        import torch

        if part == "val" and not len(self.labels["val"]):
            part = "train"
        labels = np.array(self.labels[part][rows], dtype=np.int64)
        return Split(self.inputs(part, rows), torch.from_numpy(labels))


def open_cut_pool(data: DataSet, settings: CommonSettings, places: Places) -> CutPool:
    """Open the pool of all samples of a data set, from which a partition cuts silos.

    The silos of ``ShiftedImages`` are rotated parts of a public data set. Their pool is this data
    set without rotation. For any other data set, the pool joins the samples of all silos.

    Raises:
        DataError: files are missing or unusable, or the data set's silos differ in shape or
            classes.
    """
    if isinstance(data, ShiftedImages):
        return _pool_of_source(data, settings, places)
    return _pool_of_silos(data, settings, places)


def _pool_of_source(data: ShiftedImages, settings: CommonSettings, places: Places) -> CutPool:
    """Open the public images behind a ``ShiftedImages`` data set as one pool, without rotation.

    The pool has the parts of the public data set, so its validation part may be empty. If the
    images have tracks (frames of one object), a tenth of each label's training tracks becomes the
    validation part. The pool's ``train_size`` and ``test_size`` are the usual ones of the data
    set's silos.

    Raises:
        DataError: files are missing or unusable.
    """
    source = data.source
    pool, key = open_pool(source, places)
    # Rows of the source's training arrays that train and that validate
    train, val = np.arange(len(pool.train_labels)), np.empty(0, np.int64)
    if pool.train_tracks is not None:
        train, val = hold_out_tracks(pool.train_tracks, pool.train_labels)
    parts = {
        "train": (pool.train_images, pool.train_labels, train),
        "val": (pool.train_images, pool.train_labels, val),
        "test": (pool.test_images, pool.test_labels, np.arange(len(pool.test_labels))),
    }
    if pool.val_images is not None and pool.val_labels is not None:
        parts["val"] = (pool.val_images, pool.val_labels, np.arange(len(pool.val_labels)))

    def inputs(part: str, rows: Rows) -> Tensor:
        images, _, own = parts[part]
        return scale_pixels(shift(images[own[rows]], "D1", noise=False, key=""), source, settings)

    labels = {}
    for part, (_, of_part, own) in parts.items():
        labels[part] = of_part[own]
    return CutPool(
        labels=labels,
        inputs=inputs,
        classes=source.classes,
        key=[key, settings.pixel_scale],
        facts=data.facts(),
        train_size=source.train_size,
        test_size=source.test_size,
    )


def _pool_of_silos(data: DataSet, settings: CommonSettings, places: Places) -> CutPool:
    """Join the samples of all silos of a data set in one pool, from which new silos are cut.

    Each sample stays in its part (train, val or test). Within a part and a label, the silos are
    mixed in proportion to their sizes. All silos are loaded, which may create them in the cache.
    The pool's ``train_size`` and ``test_size`` are 0.

    Raises:
        DataError: a silo cannot be loaded, or its shape or classes differ from the first silo's.
    """
    own = replace(settings, partition="own")
    silos = [data.load(name, own, places) for name in data.silo_names(own, places)]
    # The schema is a digest of shape and classes, so equal schemas can be mixed
    for silo in silos:
        if silo.schema != silos[0].schema:
            raise DataError(
                f"data set '{data.name}': a partition mixes the samples of all silos, but those of "
                f"'{silo.name}' have another shape or other classes than those of "
                f"'{silos[0].name}': make them alike"
            )
    parts = {}
    for part in SPLITS:
        parts[part] = _Mixed([silo.splits()[part] for silo in silos])
    return CutPool(
        labels={part: mixed.labels for part, mixed in parts.items()},
        inputs=lambda part, rows: parts[part].inputs(rows),
        classes=silos[0].shape.outputs,
        key=[[silo.name, silo.schema, silo.fingerprints] for silo in silos],
        facts=_shared_facts(silos[0]),
    )


def _shared_facts(silo: Silo) -> dict[str, Any]:
    """Return the facts that a data set's silos have in common, to store them with newly cut silos.

    The facts are 'classes' (the names), 'schema' (a digest of shape and classes), and for a table
    'features' (the columns' names). If the silo states a mean and a standard deviation, 'declared'
    has them as 'mean' and 'std'.
    """
    facts: dict[str, Any] = {"classes": list(silo.classes), "schema": silo.schema}
    if silo.features:
        facts["features"] = list(silo.features)
    if silo.declared:
        facts["declared"] = {part: values.tolist() for part, values in vars(silo.declared).items()}
    return facts


class _Mixed:
    """One part of several silos, ordered so that silos alternate within each label.

    Silos that are cut from it in order then differ in their labels, but not in their hospitals.
    """

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = splits
        labels = [split.labels.numpy() for split in splits]
        self._silo = np.repeat(np.arange(len(splits)), [len(part) for part in labels])
        self._row = np.concatenate([np.arange(len(part)) for part in labels])
        # The last key decides first: place within the label, then silo, then row
        place = np.concatenate([_relative_places(part) for part in labels])
        # (n,): row of the mixed order -> position in the concatenated silos
        self._order = np.lexsort((self._row, self._silo, place))
        self.labels: Labels = np.concatenate(labels)[self._order]

    def inputs(self, rows: Rows) -> Tensor:
        """Return a copy of the inputs at ``rows``, in the order of ``rows``.

        ``rows`` are row indices of the pool, in which the samples of all silos are mixed. The
        result has one row for each, (k, *shape of an input).
        """
        import torch

        # Positions in the concatenated silos. Each silo's array, which may be memory-mapped, is
        # read once, and only at the rows that are needed
        chosen = self._order[rows]
        shape = self.splits[0].inputs.shape[1:]
        inputs = torch.empty((len(chosen), *shape), dtype=self.splits[0].inputs.dtype)
        for silo, split in enumerate(self.splits):
            here = np.flatnonzero(self._silo[chosen] == silo)
            inputs[here] = split.inputs[self._row[chosen][here]]
        return inputs


def _relative_places(labels: Labels) -> Labels:
    """Return each sample's relative position among the samples of its label, (n,), between 0 and 1.

    Sample k of a label's m samples, counted from 0, has the position (k + 0.5) / m. Sorting the
    samples of several silos by this position mixes the silos in proportion to their sizes.
    """
    place = np.empty(len(labels))
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        # Centres of equal parts of 0..1: a small silo's samples spread as widely as a large one's
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return place
