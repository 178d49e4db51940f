"""Define a silo (a hospital's train, val and test samples), its files, and data sets of silos."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import DataError, FileNamesError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import json_digest, open_sealed
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.one_line import printable
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import CLASSIFICATION, TASKS, numeric_columns
from fedsilo.datasets.downloads.public_files import Origin, PublicFiles, public_data
from fedsilo.datasets.silo.measures import (
    ColumnWords,
    LeftOutRows,
    Measure,
    picture_measures,
    unit_pixels,
)
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.tasks.task import task_named

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "val", "test")
_KEY_LENGTH = 16  # hexadecimal digits
# Files up to this many bytes are read, not memory-mapped: a map takes whole pages, and a process
# may have only a limited number of maps
_READ = 64 * 2**10

ImageReader = Callable[[Path], npt.NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """The samples of one split: ``inputs`` (n, *input_shape) and ``labels`` (n, ...); n may be 0.

    The task says what a label is: a class is (n,) int64 (``models.tasks``).

    Inputs are float32 as networks take them, or images that are scaled one batch at a time
    (``models.networks.encoders.float_inputs``): 8-bit images (uint8), or radiographs of up to 16
    bits minus 32768 (int16).
    """

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, inputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Split:
        """Build a split from two NumPy arrays, whose memory the tensors share."""
        import torch

        return cls(torch.from_numpy(inputs), torch.from_numpy(labels))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Silo:
    """The samples of one hospital.

    Attributes:
        name: the site's name.
        distribution: a name for what the data are like; sites with the same one are averaged
            together.
        shape: input shape, and the number of outputs that a network for the labels has.
        train, val, test: the splits; val and test may be empty.
        fingerprints: split -> SHA-256 of its bytes.
        features: a table's feature names in column order; empty for images. A table's inputs stay
            as they were read, with NaN for a missing value, until they are standardised.
        classes: the names of the classes or findings, empty if they have no names; or the name of a
            numeric outcome.
        dropped: number of rows left out because a value was missing or out of range, or of images
            that could not be decoded.
        declared: mean and standard deviation of each of ``columns`` from the data's schema, for
            standardising; None if the schema declares none.
        schema: a digest of a table's schema, or of the classes and size of images; all sites of a
            run must have the same.
        folder: the silo's folder in the cache, or None.
        standardisation: the statistics that standardised the features; None before that.
        task: the name of the task that the labels are for.
        outcome: the statistics (1,) that standardise numeric labels in training, which stay in
            their unit here; None before ``standardisation``, and for other labels.
    """

    name: str
    distribution: str
    shape: NetworkShape
    train: Split
    val: Split
    test: Split
    fingerprints: dict[str, str]
    features: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    dropped: int = 0
    declared: FeatureStatistics | None = None
    schema: str = ""
    folder: Path | None = None
    standardisation: FeatureStatistics | None = None
    task: str = CLASSIFICATION
    outcome: FeatureStatistics | None = None

    def splits(self) -> dict[str, Split]:
        """Return the three splits by name: 'train', 'val' and 'test'."""
        return {"train": self.train, "val": self.val, "test": self.test}

    def columns(self) -> tuple[str, ...]:
        """Return the names of the numbers to standardise: a table's features, a numeric outcome."""
        return numeric_columns(self.task, self.features, self.class_names())

    def column_values(self) -> Tensor:
        """Return the training samples' values of all columns that are standardised.

        These are all features of a table, and the outcome if it is a number. There must be at least
        one such column. NaN marks a missing value.

        Returns:
            (n, columns) float32, with the outcome last.
        """
        import torch

        parts = []
        if self.features:
            parts.append(self.train.inputs)
        if len(self.columns()) > len(self.features):
            parts.append(self.train.labels[:, None])
        return torch.cat(parts, dim=1)

    def inputs(self) -> dict[str, Tensor]:
        """Return each split's inputs by the split's name."""
        return {"train": self.train.inputs, "val": self.val.inputs, "test": self.test.inputs}

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, or '0', '1', ... if they have no names."""
        return self.classes or tuple(map(str, range(self.shape.outputs)))

    def label_counts(self) -> dict[str, list[int]]:
        """Count the samples of each split by stratum.

        A stratum is a group of samples that the task counts separately, such as a class.

        Returns:
            Split -> one count per stratum. An empty split has zeros.
        """
        import torch

        task = task_named(self.task)
        strata = task.stratum_count(self.shape.outputs)
        counts = {}
        for name, split in self.splits().items():
            counts[name] = torch.bincount(task.strata(split.labels), minlength=strata).tolist()
        return counts


class DataSet(ABC):
    """A data set that consists of silos, or that silos are cut from.

    Class attributes:
        settings: the keys that only some data sets read and that this one reads.
        headline: the metrics that its result tables show.
        silos_by_files: whether the files on each machine decide which silos exist, so that the
            server's files do not show which silos the hospitals have.
        origin: 'public' files, the user's 'own', or 'made-up' when they are first used.
        tasks: the names of the tasks that its labels can be read for.
        is_table: whether samples are rows of features, which are standardised before use.
    """

    settings: ClassVar[frozenset[str]] = frozenset()
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    silos_by_files: ClassVar[bool] = False
    origin: ClassVar[Origin] = "public"
    is_table: ClassVar[bool] = False
    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION,)

    @property
    @abstractmethod
    def name(self) -> str:
        """The data set's name."""

    @property
    def licence(self) -> PublicFiles | None:
        """Licence, source and files of a public data set; None for own and made-up data sets."""
        return public_data().get(self.name)

    @property
    def files(self) -> PublicFiles | None:
        """The public files that ``fedsilo fetch`` can download, or None."""
        if self.licence is None or not self.licence.files:
            return None
        return self.licence

    def found(self, places: Places) -> str:
        """Describe in a few words which files or silos of this data set are in the data directory.

        Returns:
            One of these texts:

            - 'made when first used' for a made-up data set, which needs no data directory.
            - 'K of N files in FOLDER' for a public data set that fedsilo can download.
            - The names of the silos, joined by ', ', for any other data set.
            - '' if there is no data directory, no file is present, or the files are unusable.
        """
        if self.origin == "made-up":
            return "made when first used"
        if places.data is None:
            return ""
        if self.files is None:
            with suppress(DataError):
                return ", ".join(self.silo_names(CommonSettings(dataset=self.name), places))
            return ""
        folder = places.data / self.files.folder
        present = 0
        for file in self.files.files:
            present += (folder / file.name).is_file()
        if not present:
            return ""
        return f"{present} of {len(self.files.files)} files in {folder.name}"

    @abstractmethod
    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the silos, or [] if only the sites know the names.

        Raises:
            DataError: the files that name the silos cannot be read.
        """

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load the silo ``name`` from the cache, and create it there if it is missing.

        A silo is the training, validation and test data of one site.

        Raises:
            DataError: no silo has this name, a file is missing or unusable, or there are too few
                samples. The error is a ``FileNamesError`` if its text lists names of files, which
                may identify patients.
        """
        names = self.silo_names(settings, places)
        if name not in names:
            error = no_such_silo(name, names)
            if self.silos_by_files:
                # The files may be named after patients
                error = FileNamesError(str(error))
            raise error
        return self._load(name, settings, places)

    @abstractmethod
    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Load a silo whose name ``load`` has checked."""

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that reads a new image file exactly as the images of ``site`` are read.

        The function takes a path, and returns an array (channels, height, width) like an image in
        ``Split.inputs``. It raises ``BrokenImageError`` for a file that cannot be read. If ``site``
        is '', a change that only one site's images get, such as a rotation, is left out.

        This base class always raises ``DataError``.

        Raises:
            DataError: the data set has no images, or its files cannot be read.
        """
        raise DataError(f"data set '{self.name}' is a table: give rows of it by --table")

    def pixel_standardisation(self, settings: CommonSettings) -> tuple[Tensor, Tensor] | None:
        """Return the mean and the standard deviation that standardise the silos' pixels, or None.

        A subclass with such statistics overrides this method. The ``settings`` may switch them off.

        Returns:
            The mean and the standard deviation of pixels in 0..1, each (channels, 1, 1). None if
            pixels are not standardised, as always in this base class. The network then scales
            pixels without such statistics.
        """
        return None

    def measures(self, silo: Silo, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return the silo's features for histograms, by default brightness and contrast."""
        return picture_measures(silo.inputs(), unit_pixels)

    def file_measures(self, name: str, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return features of a silo's files before resizing, for histograms, by default []."""
        return []

    def left_out(self, silo: Silo, settings: CommonSettings, places: Places) -> LeftOutRows:
        """Count the samples that the silo left out because they are incomplete or unreadable.

        The default has only the total, without a number per column.
        """
        return LeftOutRows(silo.dropped)

    def gives_validation(self, settings: CommonSettings, places: Places) -> bool:
        """Tell whether the files name validation samples, so none are cut. False by default."""
        return False

    def notices(self, settings: CommonSettings) -> list[str]:
        """Return notices about the data on this machine, one sentence each, or []."""
        return []

    def column_words(self, settings: CommonSettings) -> Mapping[str, ColumnWords]:
        """Return column -> its title and level names for people.

        Empty if this machine has no schema with such words, which is the default.
        """
        return {}

    def unread_files(self, settings: CommonSettings, places: Places) -> list[str]:
        """Describe files next to the data that are not read, one sentence each, by default []."""
        return []


def strata_of(labels: npt.NDArray[Any], task: str) -> npt.NDArray[np.int64]:
    """Return the index of each label's stratum, (n,), to give splits equal shares of all strata.

    The task decides the strata. For a classification they are the classes, and for survival the
    patients with and without an event.

    Args:
        labels: labels (n, ...) in the form that the task uses.
        task: the task's name.
    """
    import torch

    strata: npt.NDArray[np.int64] = task_named(task).strata(torch.from_numpy(labels)).numpy()
    return strata


def fingerprint(split: Split) -> str:
    """Compute the SHA-256, in hexadecimal, of the inputs and labels of a split.

    The digest covers the bytes of all values, in the order of the samples. It does not cover the
    shapes and types of the arrays.
    """
    # Only the bytes count: shape and type are not in the digest
    digest = hashlib.sha256()
    for tensor in (split.inputs, split.labels):
        # Without a copy, since it may be large
        digest.update(np.ascontiguousarray(tensor.numpy()).reshape(-1).data)
    return digest.hexdigest()


def no_such_silo(name: str, names: Sequence[str]) -> DataError:
    """Build the error for a silo that does not exist, with a message that lists all silos."""
    return DataError(
        f"there is no silo '{name}': {len(names)} silos are {', '.join(names)}; name one of them"
    )


def save_silo(
    folder: Path,
    splits: Mapping[str, Split],
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Write a silo into an existing folder: two ``.npy`` files per split, and ``silo.json``.

    Only the folder's owner may read it, because it may contain copies of patients' rows.

    Args:
        folder: the folder. Its mode becomes 700.
        splits: split -> samples.
        facts: JSON values by key, such as 'name', 'distribution', 'classes' and 'task', from which
            ``open_silo`` builds the silo. The key 'fingerprints' is added.
        notes: sentences about the data, such as the number of imputed values, which ``open_silo``
            logs. A sentence is added for each split whose numeric outcomes are all equal, because
            R² is then undefined.

    Raises:
        OSError: a file cannot be written.
    """
    # Before the first array is written, so that no other user can open one meanwhile
    folder.chmod(0o700)
    for name, split in splits.items():
        np.save(folder / f"{name}-inputs.npy", split.inputs.numpy())
        np.save(folder / f"{name}-labels.npy", split.labels.numpy())
    fingerprints = {name: fingerprint(split) for name, split in splits.items()}
    constant = _constant_outcomes(facts, splits)
    write_atomically(
        folder / "silo.json",
        json.dumps({**facts, "fingerprints": fingerprints, "notes": [*notes, *constant]}),
        0o600,
    )


def _constant_outcomes(facts: Mapping[str, Any], splits: Mapping[str, Split]) -> list[str]:
    """Return a sentence for each split whose numeric outcomes are all equal.

    Such a split has no R², the measure of a regression's quality. An empty split gets no sentence.
    If the task has no numeric outcome, the result is []. ``facts`` has the silo's 'name' and
    'task'. Without 'task', the task is classification.
    """
    sentences = []
    if TASKS[facts.get("task", CLASSIFICATION)].numeric:
        for name, split in splits.items():
            if len(split) and bool((split.labels == split.labels[0]).all()):
                sentences.append(
                    f"site {facts['name']}: all outcomes of split '{name}' are equal, so it has no "
                    "R²"
                )
    return sentences


def cached_silo(
    folder: Path, name: str, facts: Sequence[Any], classes: int, fill: Callable[[Path], None]
) -> Silo:
    """Open a silo from the cache, and create it there if it is missing or was altered.

    A file with checksums shows whether the silo's files were altered. The silo's folder is in
    ``folder``. Its name has the silo's name and a digest of ``facts``, so a silo with other facts
    has another folder.

    Args:
        folder: the cache's folder for this data set's silos.
        name: the silo's name.
        facts: everything that decides the silo's content, as JSON values.
        classes: the number of outputs that a network for the labels has.
        fill: function that writes the silo into a new folder with ``save_silo``.

    Raises:
        DataError: the silo's folder cannot be created or read.
        Exception: any error that ``fill`` raises.
    """
    # Any other fact gives another folder, so an outdated silo is never opened by mistake
    target = folder / f"{folder_name(name)}-{json_digest(facts)[:_KEY_LENGTH]}"
    return open_sealed(target, fill, lambda found: open_silo(found, classes))


def open_silo(folder: Path, classes: int) -> Silo:
    """Open a silo that ``save_silo`` wrote: its arrays, and the facts in ``silo.json``.

    The notes on the silo's data are logged, each only once per process. Array files above 64 KiB
    are memory-mapped, but changes to the arrays never reach the files. The caller must check that
    the files were not altered.

    Args:
        folder: the silo's folder.
        classes: the number of outputs that a network for the labels has, which the files do not
            state.
    """
    facts = json.loads((folder / "silo.json").read_text())
    for note in facts.get("notes", ()):
        log_once(note)
    splits = {name: _open_split(folder, name) for name in SPLITS}
    declared = None
    if facts.get("declared"):
        statistics = facts["declared"]
        declared = FeatureStatistics(np.array(statistics["mean"]), np.array(statistics["std"]))
    return Silo(
        name=facts["name"],
        distribution=facts["distribution"],
        shape=NetworkShape(tuple(splits["train"].inputs.shape[1:]), classes),
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        fingerprints=facts["fingerprints"],
        features=tuple(facts.get("features", ())),
        classes=tuple(facts.get("classes", ())),
        dropped=facts.get("dropped", 0),
        declared=declared,
        schema=facts.get("schema", ""),
        folder=folder,
        task=facts.get("task", CLASSIFICATION),
    )


@cache
def log_once(note: str) -> None:
    """Log a note on this machine, only once per process, because a run opens its silos often."""
    logging.getLogger("flwr").warning("fedsilo: %s", printable(note))


def _open_split(folder: Path, name: str) -> Split:
    """Open the arrays of split ``name`` in a silo's folder.

    Files above 64 KiB are memory-mapped. Smaller files, and files that cannot be mapped, are read.
    """
    import torch

    def open_array(part: str) -> Tensor:
        path = folder / f"{name}-{part}.npy"
        if path.stat().st_size <= _READ:
            return torch.from_numpy(np.load(path))
        try:
            # Copy-on-write maps: tensors that share the page cache and cannot alter the file.
            return torch.from_numpy(np.load(path, mmap_mode="c"))
        except ValueError:
            return torch.from_numpy(np.load(path))  # an empty file cannot be mapped

    return Split(open_array("inputs"), open_array("labels"))
