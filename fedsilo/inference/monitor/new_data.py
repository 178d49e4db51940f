"""Reads new cases for a model, with their labels if the file has some."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsilo.core.files.locations import find_places
from fedsilo.core.files.text_files import read_rows, same_text
from fedsilo.datasets.images.image_data_set import ImageDataSet
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.tables.parsing import BOOLEANS
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.datasets.tables.table_files import read_table
from fedsilo.inference.predict.inputs import (
    Inputs,
    as_cell,
    open_inputs,
    table_schema,
)
from fedsilo.inference.predict.predict_request import CaseSource
from fedsilo.runs.trained_model import TrainedModel


@dataclass(frozen=True)
class NewData:
    """New cases, and the class of each that could be read, -1 where it is not known."""

    inputs: Inputs
    labels: Tensor  # (k,) int64, of the readable inputs

    def features(self) -> Tensor:
        """Return the readable inputs as they were read; images are decoded again."""
        if self.inputs.read is not None:
            return self.inputs.read
        return torch.cat(list(self.inputs.batches()))


def open_new_data(model: TrainedModel, data: Path) -> NewData:
    """Open the cases of a folder, a table or a manifest of images; errors as ``open_inputs``."""
    by_name: dict[str, int] = {}
    if data.is_dir():
        inputs = open_inputs(model, CaseSource("images", data))
    elif model.silo.features:
        inputs = open_inputs(model, CaseSource("table", data))
        schema = table_schema(model)
        by_name = dict(_of_table(data, schema, _by_label(schema.classes)))
    else:
        inputs = open_inputs(model, CaseSource("manifest", data))
        by_name = dict(_of_manifest(data, _by_label(_read_class_labels(model))))
    labels = [by_name.get(name, -1) for name in inputs.names]
    return NewData(inputs, torch.tensor(labels))


def _read_class_labels(model: TrainedModel) -> Mapping[str, Sequence[str]]:
    """Return the labels that the data set declares for each class of images."""
    data, common = data_set(model.common.dataset), model.common
    if isinstance(data, ImageDataSet):
        return data.classes(common, find_places(common.data_dir, common.cache_dir))
    return dict.fromkeys(model.classes, ())


def _by_label(classes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Map each text that a label may have to its class number: a class's name, or a value of it."""
    numbers = {}
    for number, name in enumerate(classes):
        numbers[same_text(name)] = number
    # After all names, because a value counts even if it is the name of another class
    for number, values in enumerate(classes.values()):
        for value in values:
            numbers[same_text(value)] = number
    return numbers


def _of_table(
    path: Path, schema: TableSchema, classes: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield the line number, as text, and the class of each row whose label the schema knows."""
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
        label = classes.get(text, classes.get(BOOLEANS.get(text.lower(), "")))
        if label is not None:
            yield str(number), label


def _of_manifest(path: Path, classes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for _, row in read_rows(path, ("path",), ("label", "split", "patient", "mask")):
        label = classes.get(same_text(row.get("label", "")))
        if label is not None:
            yield as_cell(row["path"]), label
