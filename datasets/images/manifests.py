"""The user's own images: a declaration in the data directory, and a manifest (CSV) per site.

docs/images.md describes both. Errors name the manifest, line and column, but never a patient or an
image's file, which may be named after a patient, because errors travel to the server.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, data_folder
from fedsilo.core.files.text_files import normalise_name, read_rows, same_text
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, SURVIVAL
from fedsilo.datasets.images.declaration import (
    Declaration,
    label_columns,
    resolve_inside,
    stored_name,
)
from fedsilo.datasets.images.decoding import describe
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet
from fedsilo.datasets.images.index import ImageIndex, ListedImage, index_images, take_share
from fedsilo.datasets.silo.declared_silos import read_declared
from fedsilo.datasets.silo.silos import SPLITS

_LARGEST = float(np.finfo(np.float32).max)  # the largest outcome
# How programs write that a patient is unknown; such images do not belong to one patient
_NO_PATIENT = frozenset({"", "?", "na", "n/a", "nan", "none", "null", "unknown", "<na>"})
_MOST_OF_A_SITE = 0.5  # a patient with more than this share of a site's images gets a notice


class ManifestDataSet(ImageDataSet):
    """Images that manifests list; a site needs only its own manifest and images.

    Class attributes:
        file: the declaration's name in the data directory.
        model: the class that validates the declaration and has its defaults.
        columns: columns that manifests may have besides path, label, split and patient.
    """

    origin = "own"
    settings = ImageDataSet.settings | {"data.standardise"}
    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION, REGRESSION, MULTI_LABEL, SURVIVAL)
    file: ClassVar[str]
    model: ClassVar[type[Declaration]] = Declaration
    columns: ClassVar[tuple[str, ...]] = ()

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        """Return the declared classes with their labels; see ``Declaration.labels``."""
        return self.declaration(places).labels()

    def task(self, places: Places) -> str:
        """Return the declared task."""
        return self.declaration(places).task

    def declared_outcome(self, places: Places) -> FeatureStatistics | None:
        """Return the mean and standard deviation that the declaration states for a numeric outcome.

        The declaration is the user's YAML file that describes the data set. Mean and deviation are
        arrays of shape (1,). The result is None if the declaration lacks one of the two.
        """
        declaration = self.declaration(places)
        if declaration.mean is None or declaration.std is None:
            return None
        return FeatureStatistics(np.array([declaration.mean]), np.array([declaration.std]))

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the declared sites, in the file's order."""
        return list(self.declaration(places).sites)

    def own_size(self, places: Places) -> int:
        """Return the declared side of an image in pixels."""
        return self.declaration(places).image_size

    def own_share(self, places: Places) -> float:
        """Return the declared share of test images."""
        return self.declaration(places).test_share

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        """Read a site's manifest (list of images) for about 'split.sample-share' of the patients.

        A hash of the patients' names chooses them. An image without a known patient counts as a
        patient by itself.

        Raises:
            DataError: the manifest or the declaration (the YAML file that names it) is missing or
                invalid, or the manifest is outside the data directory.
        """
        folder = self.files_folder(places)
        declaration = self.declaration(places)
        manifest = resolve_inside("", declaration.sites[site])
        if manifest is None:
            raise DataError(
                f"{folder / self.file}: the manifest of site '{site}' is outside the data "
                "directory: move it there"
            )
        reader = Manifest(
            folder, manifest, declaration.labels(), self.file, self.columns, declaration.task
        )
        return take_share(reader.read(), settings.sample_share)

    def gives_validation(self, settings: CommonSettings, places: Places) -> bool:
        """Tell whether any manifest on this machine assigns an image to the part 'val'.

        A manifest is a site's list of images. Those that are not on this machine are skipped.
        Images that 'split.sample-share' leaves out do not count.

        Raises:
            DataError: a manifest, or the YAML file that names the manifests, is invalid.
        """
        folder = self.files_folder(places)
        for site, manifest in self.declaration(places).sites.items():
            if not (folder / manifest).is_file():
                continue
            if "val" in self.index(site, settings, places).parts:
                return True
        return False

    def files_folder(self, places: Places) -> Path:
        """Return the data directory, which contains the YAML file that describes the data set.

        Raises:
            DataError: no data directory is named.
        """
        needs = f"with {self.file}, the sites' manifests and their images"
        return data_folder(places, self.name, needs)

    def declaration(self, places: Places) -> Declaration:
        """Read the data set's declaration, a YAML file in the data directory that describes it.

        Raises:
            DataError: the file is missing or invalid, or no data directory is named.
        """
        return read_declared(self.files_folder(places) / self.file, self.model)


class OwnImages(ManifestDataSet):
    """The data set ``images``: 8-bit colour images."""

    name = "images"
    file = "images.yaml"


@dataclass
class Manifest:
    """The reader of one manifest.

    Class attributes:
        image_column: the column that names the image files.

    Attributes:
        folder: the data directory.
        file: the manifest, relative to it.
        classes: class name -> labels.
        declaration: name of the declaration file for errors.
        columns: further optional columns.
        task: what a label is; with several findings ``classes`` has their columns.
        lines: image file -> its line; filled while reading.
    """

    folder: Path
    file: str
    classes: Classes
    declaration: str
    columns: tuple[str, ...] = ()
    task: str = CLASSIFICATION
    lines: dict[str, int] = field(default_factory=dict)

    image_column: ClassVar[str] = "path"

    @property
    def where(self) -> str:
        """The manifest's path, for errors."""
        return str(self.folder / self.file)

    def read(self) -> ImageIndex:
        """Read all lines into an index of images, grouped by patient.

        An image whose patient is empty or unknown is a group by itself. If any line has a value in
        the column 'split', every line must have one. If one patient has more than half of the
        images, a warning without the patient's name is logged.

        Raises:
            DataError: a line is invalid, or a patient's images are in two parts (train, val or
                test).
        """
        optional = ("split", "patient", *self.columns)
        needed = (self.image_column, *self.label_columns())
        rows = read_rows(self.folder / self.file, needed, optional)
        # If one line names a part, all must: an empty cell is refused then
        has_parts = any(row.get("split") for _, row in rows)
        images = []
        for number, row in rows:
            label = self.label(number, row)
            name = self._file(number, row[self.image_column])
            patient = normalise_name(row.get("patient", ""))
            group = f"patient {patient}"
            if patient.lower() in _NO_PATIENT:
                group = f"file {name}"
            part = self._part(number, row["split"]) if has_parts else ""
            safe_name, mask = f"the image of line {number}", self.mask(number, row)
            images.append(ListedImage(name, label, group, safe_name, part, mask))
        index = index_images(self.where, self.folder, images, self.task)
        self._check_patients(index)
        self._mention_large_group(index)
        return index

    def label_columns(self) -> tuple[str, ...]:
        """Return the columns with an image's label, which a manifest must have."""
        return label_columns(self.task, self.classes)

    def mask(self, number: int, row: Mapping[str, str]) -> str:
        """Return the mask of the image in line ``number``, relative to the data directory.

        The result is "" here, because images with a class have no masks.
        """
        return ""

    def label(self, number: int, row: Mapping[str, str]) -> Any:
        """Return the label in a line of the manifest, in the form that the task needs.

        - For a classification it is the index of a class. The cell '1.0' equals the label '1'.
        - For a regression it is a number.
        - For several findings it is a list with 0 or 1 for each finding.
        - For survival it is a list: the time, and 1 for an event or 0 for a censored patient.

        Args:
            number: the line's number, for errors.
            row: column -> text.

        Raises:
            DataError: no class has this label, or a number, finding, time or event has an
                impossible value. The error names the line and column.
        """
        if self.task == REGRESSION:
            return self._number(number, "label", row["label"], -_LARGEST)
        if self.task == SURVIVAL:
            time = self._number(number, "time", row["time"], 0.0)
            return [time, self._finding(number, "event", row["event"])]
        if self.task == MULTI_LABEL:
            return [self._finding(number, name, row[name]) for name in self.classes]
        label = row["label"]
        text = same_text(label)
        for place, labels in enumerate(self.classes.values()):
            if text in labels:
                return place
        known = [f"'{label}'" for label in chain(*self.classes.values())]
        raise DataError(
            f"{self.where}, line {number}, column 'label': this label is not one of "
            f"{one_line(', '.join(known), 200)}: correct it, or declare it under 'classes' in "
            f"{self.declaration}"
        )

    def _number(self, number: int, column: str, text: str, lowest: float) -> float:
        """Parse a cell as a number from ``lowest`` to just below the largest float32 number.

        ``number`` and ``column`` are the cell's line and column for errors, and ``text`` is its
        text.

        Raises:
            DataError: the cell is empty, is not a number, or is outside this range.
        """
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Written so that NaN, which no comparison holds for, is refused too
        if not lowest <= value < _LARGEST:
            least = ""
            if lowest == 0:
                least = " of at least 0"
            raise DataError(
                f"{self.where}, line {number}, column '{column}': task '{self.task}' needs a "
                f"finite number{least} here: correct it, or remove the line"
            )
        return value

    def _finding(self, number: int, column: str, text: str) -> float:
        """Parse a cell as 1.0 for a finding that is present, and 0.0 for one that is absent.

        ``number`` and ``column`` are the cell's line and column for errors. ``text`` is its text.
        '1.0' counts as '1'.

        Raises:
            DataError: the cell is neither 0 nor 1.
        """
        value = same_text(text)
        if value not in ("0", "1"):
            raise DataError(
                f"{self.where}, line {number}, column '{column}': the value must be 0 or 1, but is "
                "neither: correct it, or remove the line"
            )
        return float(value)

    def _file(self, number: int, path: str) -> str:
        """Return an image's file relative to the data directory, and remember its line.

        ``lines`` (file -> line) stores the line, so that a second line with the same file is
        refused. The file need not exist. If it exists only under another Unicode form of its name,
        the result has that form.

        Args:
            number: the line in the manifest.
            path: the text of the cell.

        Raises:
            DataError: the path is empty or has unprintable characters, leads outside the data
                directory, or names a file that an earlier line names.
        """
        name = self.resolve(number, self.image_column, path)
        if name in self.lines:
            raise DataError(
                f"{self.where}, line {number}, column '{self.image_column}': the same file is in "
                f"line {self.lines[name]}: keep one of the lines"
            )
        self.lines[name] = number
        return name

    def resolve(self, number: int, column: str, path: str) -> str:
        """Return the path of the file that a cell names, relative to the data directory.

        The file need not exist. If it exists only under another Unicode form of its name (NFC or
        NFD), the result has that form.

        Args:
            number: the line of the cell, for errors.
            column: the column of the cell, for errors.
            path: the cell's text: a path relative to the manifest's folder, or an absolute path.

        Raises:
            DataError: the path is empty, has unprintable characters, or leads outside the data
                directory.
        """
        place = f"{self.where}, line {number}, column '{column}'"
        if not path or not path.isprintable():
            raise DataError(f"{place}: this is not a file name: correct it")
        if PurePosixPath(path).is_absolute():
            path = self._make_relative(path, place)
        name = resolve_inside(str(PurePosixPath(self.file).parent), path)
        if name is None:
            raise DataError(f"{place}: the file is outside the data directory: move it there")
        return stored_name(self.folder, name)

    def _make_relative(self, path: str, place: str) -> str:
        """Convert an absolute path to a path relative to the manifest's folder.

        The manifest's folder is the data directory or a folder in it. An error begins with
        ``place``, which names the file, line and column.

        Raises:
            DataError: the path is not in the data directory.
        """
        base = (self.folder / self.file).parent.resolve()
        data = self.folder.resolve()
        if not Path(os.path.normpath(path)).is_relative_to(data):
            raise DataError(
                f"{place}: the path is absolute, but not below the data directory: write it "
                "relative to the manifest's folder, or move the file there"
            )
        return os.path.relpath(path, base)

    def _part(self, number: int, part: str) -> str:
        """Check that the 'split' cell of line ``number`` is train, val or test, and return it.

        Raises:
            DataError: the cell is empty or has any other text.
        """
        if part not in SPLITS:
            raise DataError(
                f"{self.where}, line {number}, column 'split': the value must be one of "
                f"{', '.join(SPLITS)}, in all lines or in none: correct it"
            )
        return part

    def _mention_large_group(self, index: ImageIndex) -> None:
        """Log a warning if one patient has more than half of a site's images.

        A split keeps all of a patient's images in one part, so that the parts become unequal.
        Nothing is logged if the site has only one patient.
        """
        if len(set(index.groups)) < 2:
            return
        most = Counter(index.groups).most_common(1)[0][1]
        if most > _MOST_OF_A_SITE * len(index):
            logging.getLogger("flwr").warning(
                "fedsilo: %s, column 'patient': one patient has %d of %d images, which a split "
                "keeps in one part; leave the patient empty where it is not known",
                self.where,
                most,
                len(index),
            )

    def _check_patients(self, index: ImageIndex) -> None:
        """Check that the user's split keeps each patient in one part.

        If the manifest names no parts, the check passes.

        Raises:
            DataError: a patient is in two parts. The error names the lines, but not the patient.
        """
        seen: dict[str, tuple[str, int]] = {}
        pairs: list[str] = []
        # Without a given split there are no parts, and so nothing to check
        for group, part, number in zip(
            index.groups, index.parts, self.lines.values(), strict=False
        ):
            first_part, first_number = seen.setdefault(group, (part, number))
            if first_part != part:
                pairs.append(f"{first_number} ({first_part}) and {number} ({part})")
        if pairs:
            raise DataError(
                f"{self.where}, column 'patient': a patient is in two parts, in lines "
                f"{describe(pairs)}: put all images of a patient into one part"
            )


IMAGES = OwnImages()
