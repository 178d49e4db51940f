"""Describes a single case on a page: the values of its inputs, and the reasons for its answer.

Reasons are Shapley values of a table's columns, or maps over an image. ``fedsilo explain --table``
and ``--image`` explain a new case in the same way.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedsilo.client_app.summary.suppression import secret_of, suppress
from fedsilo.core.drawing.panels import without_frame
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.datasets.images.decoding import BrokenImageError
from fedsilo.datasets.registry import image_reader
from fedsilo.datasets.silo.silos import Split
from fedsilo.datasets.tables.columns import Column
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.explanations.columns import (
    METHOD,
    column_contributions,
    columns_of,
    probabilities_of,
)
from fedsilo.explanations.image_explanation import ImageExplanation, draw_image
from fedsilo.explanations.sample import explain_case
from fedsilo.inference.predict.answers import Predictions
from fedsilo.inference.predict.inputs import FileInputs, Inputs, RowInputs, table_inputs
from fedsilo.models.measures.novelty import Floats
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.runs.trained_model import TrainedModel, refuse_table_or_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsilo.explanations.sample import Explanation

_FEW = 5  # a number with at most this many different values has them listed
PICTURES = 50  # largest number of images on a page


@dataclass(frozen=True)
class Value:
    """The value of one column of a case, as a page shows it."""

    name: str  # the column's title, with its name and unit
    text: str
    usual: str  # usual range in training, if enough patients support it
    mark: str  # imputed, or beyond the training values
    adds: float  # contribution to the probability of the prediction; 0 without an explanation
    share: float  # contribution relative to the input that matters most, from -1 to 1


@dataclass(frozen=True)
class ValueTexts:
    """Formats the values of a table's cases for a page."""

    schema: TableSchema
    training: Floats  # (n, f) rows as they were read, NaN where a value is missing; n may be 0
    standardisation: FeatureStatistics  # its means replace missing values
    floor: int  # fewest patients that a statement about training rows rests on

    def of(self, row: Floats, unusual: Sequence[str], adds: Mapping[str, float]) -> Iterator[Value]:
        """Yield the value of each column of a case for a page, the largest contribution first.

        Contributions are sorted by absolute size. A ``Value`` has the column's title, the value and
        the usual values as text, a mark, and the contribution. The mark is "imputed" for a missing
        value. Otherwise it is "unusual" for a column in ``unusual``, and empty for any other
        column. Columns that the schema ignores are left out.

        Args:
            row: the features (f,) of the case before standardisation, NaN for a missing value.
            unusual: the columns whose value is unusual.
            adds: column -> its contribution to the probability of the answer. A column that is not
                a key contributes 0.
        """
        # Never 0, because contributions are divided by it
        most = max([*map(abs, adds.values()), 1e-9])
        values = []
        for column in self.schema.columns:
            if column.kind == "ignored":
                continue
            places = self._places(column)
            mark = ""
            if np.isnan(row[places]).any():
                mark = "imputed"
            elif column.name in unusual:
                mark = "unusual"
            text = self._text(column, row[places], float(self.standardisation.mean[places[0]]))
            usual = self._usual(column, self.training[:, places])
            own = adds.get(column.name, 0.0)
            title = column.words().title
            values.append(Value(title, text, usual, mark, own, own / most))
        yield from sorted(values, key=lambda value: -abs(value.adds))

    def _places(self, column: Column) -> list[int]:
        """Return the indices of the features that hold a column's value.

        A numeric column has one such feature, and a categorical column one for each level except
        the first. A feature ``column=unmeasured``, which only marks a missing value, is not
        returned. If none of these features exists, the list is empty.
        """
        features = self.schema.features()
        places = []
        if column.name in features:
            places.append(features.index(column.name))
        for level in column.levels[1:]:
            if f"{column.name}={level}" in features:
                places.append(features.index(f"{column.name}={level}"))
        return places

    def _text(self, column: Column, values: Floats, mean: float) -> str:
        """Format the value of a column: a number, or the name of a level.

        For a missing value, the text says that it is missing and names the replacement. This is the
        mean of a numeric column, and "the mixture of all levels" for a categorical one.

        Args:
            column: the column.
            values: the values (f,) of the column's features: one number, or 0 and 1 for each level
                except the first. If all are 0, the level is the first. NaN stands for a missing
                value.
            mean: the mean of a numeric column in training.
        """
        if np.isnan(values).any():
            used = f"{mean:.4g}, the mean,"
            if column.levels:
                used = "the mixture of all levels"
            return f"missing; {used} is used"
        if not column.levels:
            return f"{values[0]:.6g}"
        level = column.levels[0]
        if values.any():
            level = column.levels[int(values.argmax()) + 1]
        return column.words().level(level)

    def _usual(self, column: Column, rows: Floats) -> str:
        """Describe the usual values of a column in training, from its features' ``rows`` (n, f).

        For a numeric column with more than five different values, the text is the range of the
        middle 90 % of patients. If fewer than ``floor`` patients are beyond each end, it is the
        range of the middle 50 %. If fewer than ``floor`` are beyond each end of that range too, the
        text is empty.

        For any other column, the text lists the values that at least ``floor`` patients have, with
        the shares of patients.
        """
        known = rows[~np.isnan(rows).any(axis=1)]
        if column.levels:
            # The first level is not a feature: its rows have 0 in all features
            first = 1 - known.sum(axis=1, keepdims=True)
            counts = np.hstack([first, known]).sum(axis=0)
            names = list(map(column.words().level, column.levels))
            return self._common(column.name, names, counts.astype(int).tolist())
        found, counts = np.unique(known[:, 0], return_counts=True)
        if len(found) <= _FEW:
            return self._common(column.name, [f"{one:.4g}" for one in found], counts.tolist())
        for share in (0.05, 0.25):
            # An end may equal one patient's value, but it is never the smallest or the largest:
            # ``floor`` patients or more are at or beyond it
            if len(known) * share >= self.floor:
                low, high = np.quantile(known[:, 0], (share, 1 - share))
                return f"{low:.4g} to {high:.4g} ({1 - 2 * share:.0%} of patients)"
        return ""

    @cached_property
    def _secret(self) -> int:
        """The number that decides which further counts are hidden.

        Equal training rows give equal numbers.
        """
        return secret_of(self.training.tobytes())

    def _common(self, column: str, names: Sequence[str], counts: Sequence[int]) -> str:
        """List the values that at least ``floor`` patients have, with the shares of patients.

        Smaller counts are hidden. If a reader could compute a hidden count from the total, further
        values are hidden in a random order. The column's name and a secret seed decide this order.

        Args:
            column: the name of the column.
            names: the names of the values.
            counts: the number of patients with each value. Shares refer to their sum.
        """
        shown = suppress(counts, self.floor, self._secret, column)
        texts = []
        for name, count in zip(names, shown, strict=True):
            if count is not None:
                texts.append(f"{name} ({count / sum(counts):.0%})")
        return ", ".join(texts)


@dataclass(frozen=True)
class Reasons:
    """The explanations of answers, by the index of a case among the readable inputs."""

    # Column -> what it adds to the probability of the answer
    adds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    # A PNG of the image next to its map, and a description in words
    pictures: Mapping[int, tuple[bytes, str]] = field(default_factory=dict)
    limits: Sequence[str] = ()  # meaning and limits of the explanations, a sentence each

    def picture(self, index: int) -> dict[str, str]:
        """Build the template variables of a case's picture.

        ``image`` is the picture as a data URL, and ``image_text`` its description. If the case has
        no picture, both are empty strings. ``index`` is the case's index among the readable inputs.
        """
        if index not in self.pictures:
            return {"image": "", "image_text": ""}
        content, words = self.pictures[index]
        return {"image": data_url(content), "image_text": words}


def reasons_of(model: TrainedModel, predictions: Predictions, shown: Sequence[int]) -> Reasons:
    """Explain the answers of the cases that a page shows.

    For a table, the contribution of each column to the answer is computed. For images, pictures of
    the first 50 answered cases are drawn. If the model predicts classes, a picture also has a map
    of the parts of the image that decided the answer. A case without an answer is not explained.

    Args:
        model: the model.
        predictions: the predictions of the model for all cases.
        shown: the indices of the cases on the page, among all inputs.
    """
    kept = {place: index for index, place in enumerate(predictions.inputs.kept())}
    answered = predictions.answered()
    chosen = []
    for place in shown:
        if place in kept and answered[kept[place]]:
            # Tensors have only the k readable inputs, so places among all become indices of these
            chosen.append(kept[place])
    if not chosen:
        return Reasons()
    if model.silo.features:
        assert isinstance(predictions.inputs, RowInputs)
        return _columns(model, predictions, predictions.inputs, chosen)
    if predictions.task.name != CLASSIFICATION:
        return _plain_pictures(predictions.inputs, chosen[:PICTURES])
    return _pictures(model, predictions.inputs, chosen[:PICTURES])


def _columns(
    model: TrainedModel, predictions: Predictions, inputs: RowInputs, chosen: Sequence[int]
) -> Reasons:
    # The model's own answers: a temperature does not change which class is the most probable
    answers = predictions.own[chosen].argmax(dim=1)
    features, task = model.silo.features, predictions.task
    predict, answer = task.predict, "answer"
    if task.name == CLASSIFICATION:
        predict, answer = probabilities_of, "probability of the answer"
    parts, _ = column_contributions(
        model.network, inputs.inputs[chosen], features, answers, predict
    )
    names = columns_of(features)
    adds = {}
    for index, row in zip(chosen, parts.tolist(), strict=True):
        adds[index] = dict(zip(names, row, strict=True))
    said = (
        f"What an input adds: {METHOD}, against the mean of the training rows, in one pass without "
        f"dropout. The parts add up to the {answer} less that of the mean row. This says how the "
        "model uses an input, not that the input causes the disease or that changing it helps."
    )
    return Reasons(adds=adds, limits=[said])


def _plain_pictures(inputs: Inputs, chosen: Sequence[int]) -> Reasons:
    """Draw images as the network sees them, without maps of the important parts.

    This is for tasks other than classification, because such maps explain the probability of a
    class. ``chosen`` has the indices of the images among the readable inputs.
    """
    made, places = {}, inputs.kept()
    for index in chosen:
        figure = new_figure(2.6, 2.6)
        axes = figure.subplots()
        draw_image(axes, read_image(inputs, places[index], index))
        without_frame(axes)
        made[index] = as_png(figure), "The image as the network sees it."
    return Reasons(pictures=made)


def _pictures(model: TrainedModel, inputs: Inputs, chosen: Sequence[int]) -> Reasons:
    made: dict[int, tuple[bytes, str]] = {}
    places = inputs.kept()
    try:
        for index in chosen:
            image = read_image(inputs, places[index], index)
            cases = Split(image[None], torch.zeros(1, dtype=torch.int64))
            explained = explain_case(model.lab, model.network, cases, 0, "")
            if isinstance(explained, ImageExplanation):
                figure = new_figure(5.0, 2.6)
                explained.draw(*figure.subplots(1, 2))
                made[index] = as_png(figure), explained.saliency.place
    except SettingError as error:
        return Reasons(limits=[f"What spoke for an answer is not shown: {error}."])
    said = (
        f"Maps over images, of up to {PICTURES} cases, show what mattered to the answer. They say "
        "how the model uses an image, not what causes the disease."
    )
    return Reasons(pictures=made, limits=[said])


def read_image(inputs: Inputs, place: int, index: int) -> torch.Tensor:
    """Read the image of a case, (channels, h, w), with its pixels as the data set stores them.

    Args:
        inputs: the images. They are files, which are decoded at each call, or a tensor of the
            readable images.
        place: the index of the image among all inputs, which finds a file.
        index: the index of the image among the readable inputs, which finds a row of a tensor.
    """
    # Images of files are decoded again, because keeping all of them could fill the memory
    if isinstance(inputs, FileInputs):
        return torch.from_numpy(np.array(inputs.reader(inputs.paths[place])))
    assert isinstance(inputs, RowInputs)
    return inputs.inputs[index]


def data_url(png: bytes) -> str:
    """Return a PNG as a URL that holds the picture itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def as_png(figure: Figure) -> bytes:
    """Render a figure as the content of a PNG file, at 110 dots per inch.

    Equal figures give equal bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(110)
    buffer = io.BytesIO()
    # 'savefig' would draw all of it twice
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def explain_new_case(
    model: TrainedModel, table: Path | None, row: int, image: Path | None
) -> Explanation:
    """Explain the prediction for one new case, a row of a table or an image.

    Exactly one of ``table`` and ``image`` must be given.

    Args:
        model: the model.
        table: the file of the table, or None for an image.
        row: the number of the row in the table, from 0.
        image: the file of the image, or None for a table.

    Raises:
        DataError: the row or the image cannot be used, or one of them is given although the run's
            data are of the other kind.
        SettingError: the network's last feature maps are too small to explain an image.
    """
    refuse_table_or_images(model, table=table is not None)
    if table is not None:
        case, name = _read_row(model, table, row), f"{table.name}, row {row}"
    else:
        assert image is not None, "a table or an image is given"
        case, name = _read_image(model, image), image.name
    # The label is unknown, and no explanation of a new case shows it
    cases = Split(case[None], torch.zeros(1, dtype=torch.int64))
    return explain_case(model.lab, model.network, cases, 0, f"{model.site}, {name}")


def _read_row(model: TrainedModel, table: Path, row: int) -> torch.Tensor:
    inputs = table_inputs(model, table, None)
    if not 0 <= row < len(inputs.names):
        raise DataError(
            f"{table} has {len(inputs.names)} rows, counted from 0: there is no row {row}"
        )
    if row in inputs.faults:
        raise DataError(f"{table}, line {inputs.names[row]}: {inputs.faults[row]}")
    return inputs.inputs[inputs.kept().index(row)]


def _read_image(model: TrainedModel, path: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(image_reader(model.site, model.common)(path))
    except BrokenImageError as error:
        raise DataError(f"{path} {error}") from None
