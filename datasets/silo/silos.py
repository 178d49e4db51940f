"""A silo, the samples of a hospital with train, val and test split, as tensors and as files."""

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
from fedsilo.core.one_line import printable
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.downloads.public_files import Origin, PublicFiles, public_data
from fedsilo.datasets.silo.measures import (
    ColumnWords,
    LeftOutRows,
    Measure,
    picture_measures,
    unit_pixels,
)
from fedsilo.models.networks.kinds import Task

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "val", "test")
_KEY_LENGTH = 16  # hexadecimal digits
# Bytes of a file that is read: a map takes whole pages, and a process has only so many maps
_READ = 64 * 2**10

ImageReader = Callable[[Path], npt.NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """``inputs`` (n, *input_shape) and ``labels`` (n,) int64; n may be 0.

    Inputs are float32 as networks take them, or images scaled a batch at a time
    (``models.networks.encoders.float_inputs``): 8-bit ones (uint8), or radiographs of up to 16
    bits less 32768 (int16).
    """

    inputs: Tensor
    labels: Tensor

    @classmethod
    def of(cls, inputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Split:
        """Return the split of two arrays, whose memory it shares."""
        import torch

        return cls(torch.from_numpy(inputs), torch.from_numpy(labels))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Silo:
    """The samples of one hospital.

    Attributes:
        name: the site's name.
        distribution: what its data are like; sites of one distribution are summed up together.
        task: input shape and number of classes.
        train, val, test: the splits; val and test may be empty.
        fingerprints: a SHA-256 per split.
        features: a table's features in order, empty for images. A table's inputs are as they were
            read, NaN where a value is missing, until they are standardised.
        classes: the names of the classes, if they have some.
        dropped: number of rows left out because a value was missing or out of range, or of images
            that could not be decoded.
        declared: statistics in the data's schema, by which features can be standardised.
        schema: a digest of a table's schema, or of images' classes and size, which all sites of a
            run must share.
        folder: where it is in the cache, if it is.
        standardisation: the statistics that its features were standardised by; None before.
    """

    name: str
    distribution: str
    task: Task
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

    def splits(self) -> dict[str, Split]:
        """Return the splits by name."""
        return {"train": self.train, "val": self.val, "test": self.test}

    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs of each split, by the split's name."""
        return {"train": self.train.inputs, "val": self.val.inputs, "test": self.test.inputs}

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes, their numbers where they have none."""
        return self.classes or tuple(map(str, range(self.task.classes)))

    def label_counts(self) -> dict[str, list[int]]:
        """Return, per split, how many samples each class has."""
        import torch

        counts = {}
        for name, split in self.splits().items():
            counts[name] = torch.bincount(split.labels, minlength=self.task.classes).tolist()
        return counts


class DataSet(ABC):
    """A data set that silos come from.

    Class attributes:
        settings: the keys of ``CommonSettings`` that only some data sets read, of those this one's.
        headline: the metrics that its tables show.
        silos_by_files: whether the files on a machine decide which silos are there, so that those
            of a server say nothing of the hospitals.
        origin: public files, the user's own, or made up when they are first used.
        is_table: whether a silo's samples are rows of features, standardised before they are used.
    """

    settings: ClassVar[frozenset[str]] = frozenset()
    headline: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    silos_by_files: ClassVar[bool] = False
    origin: ClassVar[Origin] = "public"
    is_table: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The data set's name."""

    @property
    def licence(self) -> PublicFiles | None:
        """Its licence, source and files, or None if it is the user's own or made up."""
        return public_data().get(self.name)

    @property
    def files(self) -> PublicFiles | None:
        """The public files that can be fetched, or None."""
        if self.licence is None or not self.licence.files:
            return None
        return self.licence

    def found(self, places: Places) -> str:
        """Describe the files of this data set in the data directory; empty if there are none."""
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
        """Return the names of its silos, by partition, or none if only the sites know.

        Raises:
            DataError: what names them cannot be read.
        """

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Return the silo ``name``, from the cache or made now.

        Raises:
            DataError: there is no such silo, a file is missing or unusable, or data are too few.
        """
        names = self.silo_names(settings, places)
        if name not in names:
            error = no_such_silo(name, names)
            if self.silos_by_files:
                # The names of files may be those of patients
                error = FileNamesError(str(error))
            raise error
        return self._load(name, settings, places)

    @abstractmethod
    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Return a silo that there is."""

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return the function that reads a new image's file as the site's own images were read.

        It returns (channels, height, width) as ``Split``'s inputs have it, and raises a
        ``BrokenImageError`` for a file that cannot be read. A site's own rotation or tone curve is
        applied to new images too, unless the site is "".

        Raises:
            DataError: the data set has no images, or its declaration cannot be read.
        """
        raise DataError(f"data set '{self.name}' is a table: give rows of it by --table")

    def pixel_standardisation(self, settings: CommonSettings) -> tuple[Tensor, Tensor] | None:
        """Return mean and std (channels, 1, 1) that standardise an image of 0..1.

        It is None if a silo holds pixels as they were read, and networks scale them.
        """
        return None

    def measures(self, silo: Silo, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return the histograms of the silo's samples; for images, how bright they are."""
        return picture_measures(silo.inputs(), unit_pixels)

    def file_measures(self, name: str, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return the histograms of the silo's files as they are, maybe none."""
        return []

    def left_out(self, silo: Silo, settings: CommonSettings, places: Places) -> LeftOutRows:
        """Return the samples that the silo leaves out."""
        return LeftOutRows(silo.dropped)

    def gives_validation(self, settings: CommonSettings, places: Places) -> bool:
        """Return whether the files name validation samples, so that none are cut."""
        return False

    def notices(self, settings: CommonSettings) -> list[str]:
        """Return notices about the data on this machine, one sentence each."""
        return []

    def column_words(self, settings: CommonSettings) -> Mapping[str, ColumnWords]:
        """Return column -> its words for people; empty if this machine has no schema with words."""
        return {}

    def unread_files(self, settings: CommonSettings, places: Places) -> list[str]:
        """Say how many files next to the data are not read and why, one sentence per folder."""
        return []


def fingerprint(split: Split) -> str:
    """Return a SHA-256 of a split's bytes."""
    digest = hashlib.sha256()
    for tensor in (split.inputs, split.labels):
        # Without a copy, since it may be large
        digest.update(np.ascontiguousarray(tensor.numpy()).reshape(-1).data)
    return digest.hexdigest()


def no_such_silo(name: str, names: Sequence[str]) -> DataError:
    """Return the error for a silo that does not exist."""
    return DataError(
        f"there is no silo '{name}': {len(names)} silos are {', '.join(names)}; name one of them"
    )


def save_silo(
    folder: Path,
    splits: Mapping[str, Split],
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Write a silo's arrays and ``facts`` (JSON: name, distribution, classes, ...) to a folder.

    Only its owner can read it: it may be a copy of patients' rows. ``notes`` are sentences about
    the data for the log of whoever opens the silo, such as a count of imputed values.
    """
    folder.chmod(0o700)
    for name, split in splits.items():
        np.save(folder / f"{name}-inputs.npy", split.inputs.numpy())
        np.save(folder / f"{name}-labels.npy", split.labels.numpy())
    fingerprints = {name: fingerprint(split) for name, split in splits.items()}
    write_atomically(
        folder / "silo.json",
        json.dumps({**facts, "fingerprints": fingerprints, "notes": notes}),
        0o600,
    )


def cached_silo(
    folder: Path, name: str, facts: Sequence[Any], classes: int, fill: Callable[[Path], None]
) -> Silo:
    """Return a silo from the cache; it is made first if it is not there or was altered.

    Args:
        folder: the cache's folder of the data set's silos.
        name: the beginning of the silo's own folder's name, before its key.
        facts: all that decides the content, JSON-serialisable: their digest is the key.
        classes: number of classes.
        fill: writes the silo into a new folder by ``save_silo``.

    Raises:
        DataError: the cached files were altered and cannot be made again, or what ``fill`` raises.
    """
    target = folder / f"{name}-{json_digest(facts)[:_KEY_LENGTH]}"
    return open_sealed(target, fill, lambda found: open_silo(found, classes))


def open_silo(folder: Path, classes: int) -> Silo:
    """Return the silo that ``save_silo`` wrote; its larger arrays are memory-mapped."""
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
        task=Task(tuple(splits["train"].inputs.shape[1:]), classes),
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
    )


@cache
def log_once(note: str) -> None:
    """Write a note to this machine's log; a run opens its silos often, but says it once."""
    logging.getLogger("flwr").warning("fedsilo: %s", printable(note))


def _open_split(folder: Path, name: str) -> Split:
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
