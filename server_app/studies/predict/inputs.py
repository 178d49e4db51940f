"""What is predicted: files that are read a batch at a time, rows of a table, or a site's split."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsilo.client_app.training.evaluation import batch_size, in_batches
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.io.locations import find_places
from fedsilo.datasets.io.text_files import read_rows, read_text
from fedsilo.datasets.registry import data_set, image_reader
from fedsilo.datasets.silo.silos import ImageReader
from fedsilo.datasets.tables.dataset import TableDataSet
from fedsilo.datasets.tables.parsing import parse_new_rows
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.maths.standardisation import standardised
from fedsilo.server_app.studies.predict.model import (
    SiteModel,
    refuse_other_rows,
    refuse_table_or_images,
)
from fedsilo.server_app.studies.predict.request import PredictRequest

Advance = Callable[[int], None]  # is told how many more inputs have been read or left out
Watch = Callable[[int, int], None]  # is told how many inputs have been read, and of how many

_MANIFEST = ("label", "split", "patient", "mask")  # what a manifest may hold beside its paths
_AHEAD = 64  # files that are decoded while the network computes


class Inputs(ABC):
    """What is predicted, in order.

    Attributes:
        key: what an input is called by: ``file``, ``line`` or ``row``.
        names: of all inputs.
        faults: place among the inputs -> why it could not be read; whole once all were read.
        truth: (n,) the classes, where they are known.
        source: where they came from, for the document.
    """

    key: str
    names: Sequence[str]
    faults: dict[int, str]
    truth: Tensor | None = None
    source: Mapping[str, Any]

    @abstractmethod
    def batches(self, advance: Advance) -> Iterator[Tensor]:
        """Yield inputs (batch, *input_shape) as a silo holds them, but those with a fault."""

    def kept(self) -> list[int]:
        """Return the places of the inputs that could be read."""
        return [place for place in range(len(self.names)) if place not in self.faults]


@dataclass
class RowInputs(Inputs):
    """Inputs (k, *input_shape) that are here already."""

    key: str
    names: Sequence[str]
    inputs: Tensor
    source: Mapping[str, Any]
    faults: dict[int, str] = field(default_factory=dict)
    truth: Tensor | None = None

    def batches(self, advance: Advance) -> Iterator[Tensor]:
        """Yield them."""
        advance(len(self.faults))
        for batch in in_batches(self.inputs):
            advance(len(batch))
            yield batch


@dataclass
class FileInputs(Inputs):
    """Image files; one thread decodes ahead of the network."""

    names: Sequence[str]
    paths: Sequence[Path]
    reader: ImageReader
    numbers: int
    source: Mapping[str, Any]
    key: str = "file"
    faults: dict[int, str] = field(default_factory=dict)

    def batches(self, advance: Advance) -> Iterator[Tensor]:
        """Yield whole batches, as of a split of those files that can be read.

        Raises:
            DataError: none can be read; tells the first one's reason.
        """
        from threadpoolctl import threadpool_limits

        size, batch = batch_size(self.numbers), []
        # Products of small pictures: several threads may round otherwise
        with threadpool_limits(1, user_api="blas"):
            for place, image in enumerate(self._decoded()):
                advance(1)
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

    def _decoded(self) -> Iterator[npt.NDArray[Any] | str]:
        """Yield each file's image, or why there is none."""
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


def counted(watch: Watch, total: int) -> Advance:
    """Return what adds up how many inputs have been read, and tells ``watch``."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        watch(done, total)

    return advance


def open_inputs(model: SiteModel, request: PredictRequest) -> Inputs:
    """Return what a request names.

    Raises:
        DataError: it cannot be read, is of another kind than the run's data, or there is nothing.
    """
    if request.split is not None:
        return split_inputs(model, request.split)
    refuse_table_or_images(model, table=request.table is not None)
    if request.table is not None:
        return table_inputs(model, request.table)
    reader = image_reader(model.site, model.common)
    files, numbers = files_of(request), int(np.prod(model.silo.task.input_shape))
    source = {"files": str(request.manifest or request.images)}
    return FileInputs(list(files), list(files.values()), reader, numbers, source)


def files_of(request: PredictRequest) -> Mapping[str, Path]:
    """Return the image files that a request names, by what they are called there.

    Raises:
        SettingError: it names none.
        DataError: there are none, or the manifest is of another form.
    """
    if request.manifest is not None:
        return _listed(request.manifest)
    if request.images is None:
        raise SettingError("no images are named: give --images or --manifest")
    return _found(request.images)


def split_inputs(model: SiteModel, split: str) -> RowInputs:
    """Return the rows of a split of the site's own.

    Raises:
        DataError: there are none, or they are not those of the run.
    """
    refuse_other_rows(model, split)
    own = model.silo.splits()[split]
    if not len(own):
        raise DataError(f"site {model.site} has no {split} rows in {model.run.path}")
    names = [str(row) for row in range(len(own))]
    return RowInputs("row", names, own.inputs, {"split": split}, truth=own.labels)


def table_inputs(model: SiteModel, path: Path) -> RowInputs:
    """Return the rows of a CSV file, by the run's schema, standardised as the site's are.

    Raises:
        DataError: the file is not of the schema; with line and column.
    """
    data = data_set(model.common.dataset)
    assert isinstance(data, TableDataSet), "the model's data are a table"
    schema = data.schema(find_places(model.common.data_dir, model.common.cache_dir))
    new, figures = parse_new_rows(read_text(path), schema, str(path)), model.silo.figures
    assert figures is not None, "a finished run's table is standardised"
    numbers = sorted([*new.lines, *new.lacking])
    faults = {
        numbers.index(line): f"has no value of {', '.join(columns)}, and the schema drops such rows"
        for line, columns in new.lacking.items()
    }
    if not new.lines:
        raise DataError(f"{path}: none of {len(numbers)} rows can be used; the first {faults[0]}")
    rows = standardised(torch.from_numpy(new.rows), figures)
    return RowInputs("line", [str(n) for n in numbers], rows, {"table": str(path)}, faults)


def _found(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by their names in it, sorted; hidden ones are left out.

    Raises:
        DataError: there is no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: name one with image files by --images")
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    files = {
        name: paths[name]
        for name in sorted(paths)
        if not any(part.startswith(".") for part in Path(name).parts)
    }
    if not files:
        raise DataError(f"{folder} holds no file: name a folder with image files by --images")
    if odd := [name for name in files if not name.isprintable()]:
        raise DataError(
            f"{folder} holds {len(odd)} files whose names cannot be printed: rename them"
        )
    return {_as_cell(name): path for name, path in files.items()}


def _as_cell(name: str) -> str:
    """Return a file's name such that no spreadsheet computes it."""
    return f"./{name}" if name[:1] in ("=", "+", "-", "@") else name


def _listed(manifest: Path) -> dict[str, Path]:
    """Return the files that a manifest lists by their names there, in its order.

    Raises:
        DataError: it is no such manifest, lists nothing, or a file twice.
    """
    files: dict[str, Path] = {}
    for number, row in read_rows(manifest, ("path",), _MANIFEST):
        name = row["path"]
        cell = _as_cell(name)
        if not name or not name.isprintable() or cell in files:
            fault = "this is no file's name" if cell not in files else "the file is listed twice"
            raise DataError(f"{manifest}, line {number}, column 'path': {fault}")
        files[cell] = Path(os.path.normpath(manifest.parent / name))
    if not files:
        raise DataError(f"{manifest} lists no files")
    return files
