"""New cases for ``fedsilo monitor``: their features, and the labels in their file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsilo.core.files.locations import find_places
from fedsilo.core.files.text_files import read_rows, same_text
from fedsilo.core.tasks import CLASSIFICATION, REGRESSION
from fedsilo.datasets.images.declaration import label_columns
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.tables.parsing import BOOLEANS
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import read_table
from fedsilo.inference.predict.inputs import (
    CaseSource,
    Inputs,
    as_cell,
    open_inputs,
    table_schema,
)
from fedsilo.runs.trained_model import TrainedModel

# Reads a label's text: a class number, a number, or None if it is unknown
ReadLabel = Callable[[str], float | None]
_UNKNOWN = -1  # the class of a case without a label


@dataclass(frozen=True)
class NewData:
    """New cases, with the label of each.

    Attributes:
        inputs: the cases, n of them.
        labels: the class of each, int64 (n,), -1 if it is unknown; or the outcome, float64 (n,),
            NaN if it is unknown. For other tasks all are unknown.
    """

    inputs: Inputs
    labels: Tensor

    def features(self) -> Tensor:
        """Return the features of the k cases that can be read, (k, *input_shape), not standardised.

        Cases with a fault, such as a damaged image file, are left out. Rows of a table have NaN for
        a missing value. Image files are decoded again at each call.
        """
        if self.inputs.read is not None:
            return self.inputs.read
        return torch.cat(list(self.inputs.batches()))

    def labelled_places(self) -> Tensor:
        """Return the indices of the labelled cases, int64 (m,), counted among the readable cases.

        A case that could not be read is left out, even if it has a label in the manifest.
        """
        # A file that could not be read may have a label in the manifest, but has no prediction
        labels = self.labels[self.inputs.kept()]
        if labels.is_floating_point():
            return torch.nonzero(~labels.isnan())[:, 0]
        return torch.nonzero(labels != _UNKNOWN)[:, 0]


def open_new_data(model: TrainedModel, data: Path) -> NewData:
    """Open new cases as inputs of a model, with the labels in their file.

    A folder is read as images, which have no labels. A file is read as a table if the run's data
    are a table, and otherwise as a manifest of images. Labels are read if the model predicts
    classes or a number. If a label is absent or unknown, the case gets NaN for a number and -1 for
    a class.

    Raises:
        DataError: there are no cases, they cannot be read, or they are of another kind than the
            run's data.
    """
    task = model.lab.task.name
    by_name: dict[str, float] = {}
    if data.is_dir():
        inputs = open_inputs(model, CaseSource("images", data))
    elif model.silo.features:
        inputs = open_inputs(model, CaseSource("table", data))
        schema = table_schema(model)
        by_name = dict(_table_labels(data, schema, _label_reader(task, schema.classes)))
    else:
        inputs = open_inputs(model, CaseSource("manifest", data))
        read = _label_reader(task, _read_class_labels(model))
        columns = label_columns(task, model.classes)
        by_name = dict(_manifest_labels(data, columns, read))
    if task == REGRESSION:
        return NewData(inputs, _in_order(inputs, by_name, math.nan).double())
    return NewData(inputs, _in_order(inputs, by_name, _UNKNOWN).long())


def _in_order(inputs: Inputs, by_name: Mapping[str, float], unknown: float) -> Tensor:
    """Return the labels in the order of the inputs, ``unknown`` for an input without one."""
    return torch.tensor([by_name.get(name, unknown) for name in inputs.names])


def _read_class_labels(model: TrainedModel) -> Mapping[str, Sequence[str]]:
    """Return the labels that stand for each class in the data files, such as "0": class -> labels.

    An image data set (``ImageDataSet``) declares these labels. Any other data set of images
    declares none, so each class of the model has an empty sequence.
    """
    data, common = data_set(model.common.dataset), model.common
    if isinstance(data, ImageDataSet):
        return data.classes(common, find_places(common.data_dir, common.cache_dir))
    return dict.fromkeys(model.classes, ())


def _label_reader(task: str, classes: Mapping[str, Sequence[str]]) -> ReadLabel:
    """Choose the function that converts the text of a label to a number, or to None if unknown.

    For classification, the number is that of the class, in the order of ``classes``. For
    regression, the text itself must be a number. For any other task, every label is unknown.

    Args:
        task: the name of the task.
        classes: name of a class -> the labels that the data set declares for it.
    """
    if task == CLASSIFICATION:
        return _class_numbers(classes).get
    if task == REGRESSION:
        return _read_number
    return lambda text: None


def _read_number(text: str) -> float | None:
    """Parse a finite number. For any other text, return None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _class_numbers(classes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Map each text that may stand for a class to the number of the class.

    A class is written as its name, or as one of the labels that the data set declares for it. If a
    text is the name of one class and a label of another, the label decides. The texts are
    normalised by ``same_text``, so that "1.0" and "1" are equal.

    Args:
        classes: name of a class -> its labels. The number of a class is its position here.
    """
    numbers = {}
    for number, name in enumerate(classes):
        numbers[same_text(name)] = number
    # After all names, so that a declared label wins over the name of another class
    for number, values in enumerate(classes.values()):
        for value in values:
            numbers[same_text(value)] = number
    return numbers


def _table_labels(path: Path, schema: TableSchema, read: ReadLabel) -> Iterator[tuple[str, float]]:
    """Read the labels in a table file, for the rows that have a known label.

    The schema names the column of labels. The case of letters in this name does not matter. Texts
    are normalised by ``same_text``, so that "1.0" and "1" are equal. If ``read`` does not know the
    text "true" or "false", it is read again as "1" or "0".

    Yields:
        The line number as a string, and the label. If the table has no column of labels, nothing is
        yielded.
    """
    (_, first), *rows = read_table(path, schema.delimiter, guess_delimiter=True)
    names = [name.strip().casefold() for name in first]
    if schema.label.column.casefold() not in names:
        return
    # A row may be shorter than the header, and so end before the label
    place = names.index(schema.label.column.casefold())
    for number, cells in rows:
        text = ""
        if place < len(cells):
            text = same_text(cells[place])
        label = read(text)
        if label is None:
            label = read(BOOLEANS.get(text.lower(), ""))
        if label is not None:
            yield str(number), label


def _manifest_labels(
    path: Path, columns: Sequence[str], read: ReadLabel
) -> Iterator[tuple[str, float]]:
    """Read the column 'label' of a manifest (a CSV file of images), for images with a known label.

    Args:
        path: the manifest.
        columns: further columns that the manifest may have. They are accepted, but not read.
        read: converts a text to a label, or to None if the label is unknown.

    Yields:
        The file name from the column 'path', and the label. ``as_cell`` writes "./" before a name
        that a spreadsheet would read as a formula.
    """
    optional = tuple({"label", "split", "patient", "mask", *columns})
    for _, row in read_rows(path, ("path",), optional):
        label = read(same_text(row.get("label", "")))
        if label is not None:
            yield as_cell(row["path"]), label
