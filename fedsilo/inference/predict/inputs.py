"""Opens the inputs to predict: image files, read in batches, rows of a table, or a site's split."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import batch_size, in_batches
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import find_places
from fedsilo.core.files.text_files import read_rows
from fedsilo.core.one_line import format_count, one_line
from fedsilo.datasets.images.declaration import label_columns
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.registry import data_set, image_reader
from fedsilo.datasets.silo.silos import ImageReader
from fedsilo.datasets.tables.new_rows import parse_new_rows
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_data_set import TableDataSet
from fedsilo.datasets.tables.table_files import read_table
from fedsilo.models.maths.standardisation import standardise
from fedsilo.runs.trained_model import (
    TrainedModel,
    refuse_other_rows,
    refuse_table_or_images,
)

Watch = Callable[[int, int], None]  # gets the number of inputs read so far, and of all inputs

# Columns that a manifest may have in addition to "path"
_MANIFEST = ("label", "split", "patient", "mask")
_AHEAD = 64  # files that are decoded while the network computes


@dataclass(frozen=True)
class CaseSource:
    """The source of the cases to predict.

    Attributes:
        kind: ``images``, a folder of image files; ``manifest``, a CSV file whose column "path"
            names image files; ``table``, a CSV, Excel or Parquet file of rows, with or without
            labels; or ``split``, train, val or test of the site's own data.
        where: the folder, the file, or the name of the split.
        id_column: the column of the table with the patients' ids, or None.
    """

    kind: str
    where: Path | str
    id_column: str | None = None

    @property
    def path(self) -> Path:
        """The folder or the file."""
        return Path(self.where)


def choose_source(id_column: str | None, **named: Path | str | None) -> CaseSource:
    """Build the source of cases, after checking that the user named exactly one.

    Args:
        id_column: the column of the table with the patients' ids, or None.
        named: kind of source ('images', 'manifest', 'table' or 'split') -> folder, file or name of
            the split. None means that the user did not name this kind.

    Raises:
        SettingError: no source or more than one is named, or ``id_column`` is given without a
            table.
    """
    given = []
    for kind, where in named.items():
        if where is not None:
            given.append(CaseSource(kind, where))
    if len(given) != 1:
        names = " and ".join(f"--{source.kind}" for source in given)
        raise SettingError(
            f"{names or 'nothing'} is named to predict: give one of --images, --manifest, --table "
            "and --split"
        )
    (source,) = given
    if id_column is not None and source.kind != "table":
        raise SettingError(f"--id '{id_column}' is a column of a table: give --table too")
    return CaseSource(source.kind, source.where, id_column)


@dataclass(kw_only=True)
class Inputs(ABC):
    """The inputs to predict, in order."""

    key: str  # the kind of an input's name: file, line or row
    names: Sequence[str]
    source: Mapping[str, Any]  # files or split of the inputs, for the document
    # Place among the inputs -> why it could not be read; complete once all were read
    faults: dict[int, str] = field(default_factory=dict)
    truth: Tensor | None = None  # (n,) the classes, if known
    ids: Sequence[str] = ()  # (n,) the patients' ids, if the user names their column
    notes: Sequence[str] = ()  # remarks for the user on how the inputs were read, a sentence each
    # (k, features) rows of a table before standardisation, NaN for a missing value
    read: Tensor | None = None

    @abstractmethod
    def batches(self) -> Iterator[Tensor]:
        """Yield the readable inputs in order and in batches, (batch, *input_shape).

        They are in the form in which a silo holds them.
        """

    def watch_batches(self, watch: Watch) -> Iterator[Tensor]:
        """Yield the batches of the inputs, and report progress by ``watch(done, total)``.

        ``watch`` is called before each batch is yielded, and once at the end. ``done`` counts the
        inputs read so far, including those that could not be read.
        """
        done, total = 0, len(self.names)
        for batch in self.batches():
            # Inputs that could not be read are in no batch, but they have been tried
            done += len(batch)
            watch(done + len(self.faults), total)
            yield batch
        watch(total, total)

    def imputed_columns(self, features: Sequence[str]) -> list[tuple[str, ...]]:
        """List for each readable row of a table the columns with a missing value, which is imputed.

        ``features`` has the names of the table's features. For images, the result is an empty list.
        """
        if self.read is None:
            return []
        names = [name.partition("=")[0] for name in features]
        # A column of levels has several features, but is named once
        return [tuple(dict.fromkeys(compress(names, row))) for row in self.read.isnan().tolist()]

    def kept(self) -> list[int]:
        """Return the indices of the inputs that could be read.

        Files are read by ``batches``, so the result is complete only after the last batch.
        """
        return [place for place in range(len(self.names)) if place not in self.faults]


@dataclass(kw_only=True)
class RowInputs(Inputs):
    """Inputs (k, *input_shape) in memory."""

    inputs: Tensor

    def batches(self) -> Iterator[Tensor]:
        """Yield the inputs in batches of the size that evaluation uses."""
        yield from in_batches(self.inputs)


@dataclass(kw_only=True)
class FileInputs(Inputs):
    """Image files; one thread decodes ahead of the network."""

    paths: Sequence[Path]
    reader: ImageReader
    numbers: int  # about how many numbers an image has, which decides the size of a batch

    def batches(self) -> Iterator[Tensor]:
        """Decode the images, and yield them in batches (batch, *input_shape).

        Each batch is full except the last. A file that cannot be read is skipped, and the reason is
        added to ``faults``. The next image takes its place in the batch.

        Raises:
            DataError: no file can be read. The message has the fault of the first file.
        """
        from threadpoolctl import threadpool_limits

        size, batch = batch_size(self.numbers), list[npt.NDArray[Any]]()
        # Several threads may round products of small pictures differently
        with threadpool_limits(1, user_api="blas"):
            # A text in place of an image is the reason why the file cannot be decoded
            for place, image in enumerate(self._decode_files()):
                if isinstance(image, str):
                    self.faults[place] = image
                    continue
                batch.append(image)
                if len(batch) == size:
                    yield torch.from_numpy(np.stack(batch))
                    batch = []
        if len(self.faults) == len(self.names):
            raise DataError(
                f"none of {len(self.names)} files can be read as the run's images are; "
                f"{self.names[0]} {self.faults[0]}"
            )
        if batch:
            yield torch.from_numpy(np.stack(batch))

    def _decode_files(self) -> Iterator[npt.NDArray[Any] | str]:
        """Decode the files in order, on a thread that works ahead of the network.

        At most 64 files are decoded ahead.

        Yields:
            For each file its image, or a text with the reason why it cannot be decoded.
        """
        with ThreadPoolExecutor(1) as pool:
            paths, waiting = iter(self.paths), list[Future[npt.NDArray[Any] | str]]()
            while True:
                more = islice(paths, _AHEAD - len(waiting))
                waiting += [pool.submit(self._read, path) for path in more]
                if not waiting:
                    return
                yield waiting.pop(0).result()

    def _read(self, path: Path) -> npt.NDArray[Any] | str:
        try:
            return self.reader(path)
        except BrokenImageError as error:
            return str(error)


def open_inputs(model: TrainedModel, source: CaseSource) -> Inputs:
    """Open the cases that a user wants to predict as inputs of a model.

    A split is opened with its true answers. A table is read by the run's schema. Image files are
    only found here, and the method ``batches`` of the result reads them later.

    Raises:
        DataError: the cases are missing or cannot be read, or images are given to a run on a table,
            or a table to a run on images.
        SettingError: the site does not have the split.
    """
    if source.kind == "split":
        return _split_inputs(model, str(source.where))
    is_table = source.kind == "table"
    refuse_table_or_images(model, table=is_table)
    if is_table:
        return table_inputs(model, source.path, source.id_column)
    reader = image_reader(model.site, model.common)
    labels = label_columns(model.lab.task.name, model.classes)
    return file_inputs(source, reader, int(np.prod(model.silo.shape.input_shape)), labels)


def file_inputs(
    source: CaseSource, reader: ImageReader, numbers: int, labels: Sequence[str] = ()
) -> FileInputs:
    """Find the image files of a source, as inputs whose ``batches`` decode them later.

    Args:
        source: a folder of images, or a manifest (a CSV file with the paths of images).
        reader: decodes a file.
        numbers: the approximate number of values in an image, which decides the size of a batch.
        labels: columns of labels that a manifest may have. They are accepted, but not read.

    Raises:
        SettingError: the source is neither a folder of images nor a manifest.
        DataError: no files are found, or the manifest cannot be read.
    """
    files = files_of(source, labels)
    return FileInputs(
        key="file",
        names=list(files),
        source={"files": str(source.where)},
        paths=list(files.values()),
        reader=reader,
        numbers=numbers,
    )


def files_of(source: CaseSource, labels: Sequence[str] = ()) -> Mapping[str, Path]:
    """Find the image files of a source: name -> path.

    For a folder, these are the files in it and its subfolders, except hidden files and DICOM's
    index (DICOMDIR). For a manifest (a CSV file), these are the files that it lists. ``labels`` are
    columns of labels that a manifest may have. They are accepted, but not read.

    Raises:
        SettingError: the source is neither a folder of images nor a manifest.
        DataError: no files are found, or the manifest cannot be read.
    """
    if source.kind == "manifest":
        return _read_manifest(source.path, labels)
    if source.kind == "images":
        return _find_files(source.path)
    raise SettingError("no images are named: give --images or --manifest")


def _split_inputs(model: TrainedModel, split: str) -> RowInputs:
    """Open the samples of a split as inputs, with their true answers.

    The name of a sample is its row in the split, counted from 0.

    Raises:
        DataError: the split is empty, or its samples do not match the fingerprint that the run
            recorded.
        SettingError: the site does not have the split.
    """
    refuse_other_rows(model, split)
    own = model.silo.splits()[split]
    if not len(own):
        raise DataError(f"site {model.site} has no {split} rows in {model.run_dir}")
    read = None
    if model.silo.features:
        read = model.lab.session.silo.splits()[split].inputs
    return RowInputs(
        key="row",
        names=list(map(str, range(len(own)))),
        source={"split": split},
        inputs=own.inputs,
        read=read,
        truth=own.labels,
    )


def table_inputs(model: TrainedModel, path: Path, id_column: str | None) -> RowInputs:
    """Read a table file by the run's schema, and standardise its rows.

    The rows are standardised by the means and standard deviations with which the model's training
    rows were. A row that does not fit the schema gets its reason in ``faults``. Inputs are named by
    their lines in the file. If columns were ignored or missing values were imputed, ``notes`` has a
    sentence about this.

    Args:
        model: the model.
        path: the file.
        id_column: the column with the patients' ids, or None.

    Raises:
        DataError: the file does not fit the schema, or none of its rows can be used.
    """
    schema, statistics = table_schema(model), model.silo.standardisation
    assert statistics is not None, "a finished run's table is standardised"
    lines = read_table(path, schema.delimiter, guess_delimiter=True)
    new = parse_new_rows(lines, schema, str(path), id_column)
    numbers = sorted([*new.lines, *new.faults])
    # Faults by line number become faults by index among all rows
    faults = {numbers.index(line): fault for line, fault in new.faults.items()}
    if not new.lines:
        raise DataError(
            f"{path}: none of {len(numbers)} rows can be used; the first, line {numbers[0]}, "
            f"{faults[0]}"
        )
    ids: Sequence[str] = ()
    if new.ids:
        ids = [as_cell(new.ids[number]) for number in numbers]
    notes = []
    if new.unread:
        notes.append(f"not read: {new.unread} of the columns of {path.name}, unknown to the schema")
    if new.imputed:
        counts = [f"{count} of {name}" for name, count in new.imputed.items()]
        cells = format_count(sum(new.imputed.values()), "missing value")
        notes.append(f"imputed: {cells} ({one_line(', '.join(counts), 200)})")
    return RowInputs(
        key="line",
        names=[str(number) for number in numbers],
        source={"table": str(path)},
        faults=faults,
        ids=ids,
        notes=notes,
        inputs=standardise(torch.from_numpy(new.rows), statistics),
        read=torch.from_numpy(new.rows),
    )


def table_schema(model: TrainedModel) -> TableSchema:
    """Return the schema of the table that the run's model was trained on."""
    data = data_set(model.common.dataset)
    assert isinstance(data, TableDataSet), "the model's data are a table"
    return data.schema(find_places(model.common.data_dir, model.common.cache_dir))


def _find_files(folder: Path) -> dict[str, Path]:
    """Find all files in a folder and its subfolders: name -> path, sorted by name.

    A name is the path inside the folder. ``as_cell`` protects it from being read as a formula.
    Hidden files, files in hidden folders, and DICOM's index (DICOMDIR) are left out. Whether the
    files are images is not checked.

    Raises:
        DataError: the folder does not exist or has no files, or a file's name has unprintable
            characters.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: name one with image files by --images")
    paths: dict[str, Path] = {}
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not is_hidden and path.name != "DICOMDIR":
            paths[str(inside)] = path
    if not paths:
        raise DataError(f"{folder} has no files: name a folder with image files by --images")
    unprintable = [name for name in paths if not name.isprintable()]
    if unprintable:
        raise DataError(
            f"{folder} holds {len(unprintable)} files whose names cannot be printed: rename them"
        )
    return {as_cell(name): paths[name] for name in sorted(paths)}


def as_cell(name: str) -> str:
    """Write ``./`` before a file name or patient id that a spreadsheet would read as a formula.

    A spreadsheet reads a string as a formula if it begins with ``=``, ``+``, ``-`` or ``@``. Other
    strings are returned unchanged.
    """
    if name[:1] in ("=", "+", "-", "@"):
        return f"./{name}"
    return name


def _read_manifest(manifest: Path, labels: Sequence[str]) -> dict[str, Path]:
    """Read the image files that a manifest (a CSV file) lists, in order: name -> path.

    The column 'path' has the paths, which are absolute or relative to the manifest's folder. A name
    is the text of this cell, which ``as_cell`` protects from being read as a formula. Whether the
    files exist is not checked. The columns 'label', 'split', 'patient', 'mask' and those in
    ``labels`` may be present, but are not read.

    Raises:
        DataError: the manifest cannot be read, has no column 'path' or no rows, lists a file twice,
            or has an empty or unprintable name.
    """
    files: dict[str, Path] = {}
    for number, row in read_rows(manifest, ("path",), tuple({*_MANIFEST, *labels})):
        name = row["path"]
        cell = as_cell(name)
        fault = ""
        if cell in files:
            fault = "the file is listed twice"
        elif not name or not name.isprintable():
            fault = "this is not a file's name"
        if fault:
            raise DataError(f"{manifest}, line {number}, column 'path': {fault}")
        # Relative to the manifest, so that it may be read from any working folder
        files[cell] = Path(os.path.normpath(manifest.parent / name))
    if not files:
        raise DataError(f"{manifest} lists no files")
    return files
