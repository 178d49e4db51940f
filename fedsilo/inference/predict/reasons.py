"""Explains the predictions of a page's cases: Shapley values of columns, or maps over images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedsilo.core.errors import SettingError
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.columns import METHOD, column_contributions, columns_of
from fedsilo.explanations.image_explanation import ImageExplanation
from fedsilo.explanations.sample import explain_case
from fedsilo.inference.predict.answers import Predictions
from fedsilo.inference.predict.inputs import FileInputs, Inputs, RowInputs
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.runs.trained_model import TrainedModel

_PICTURES = 50  # images that a page shows


@dataclass(frozen=True)
class Reasons:
    """The explanations of the cases' answers, by a case's index among the readable inputs."""

    # Column -> what it adds to the probability of the answer
    adds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    # A PNG of the image beside its map, and the same in words
    pictures: Mapping[int, tuple[bytes, str]] = field(default_factory=dict)
    limits: Sequence[str] = ()  # meaning and limits of the explanations, a sentence each

    def picture(self, index: int) -> dict[str, str]:
        """Build the template variables for a case's picture; empty texts if it has none."""
        if index not in self.pictures:
            return {"image": "", "image_text": ""}
        content, words = self.pictures[index]
        coded = base64.b64encode(content).decode()
        return {"image": f"data:image/png;base64,{coded}", "image_text": words}


def reasons_of(model: TrainedModel, found: Predictions, shown: Sequence[int]) -> Reasons:
    """Explain the answers of the cases in ``shown``, which are places among all inputs.

    A case without an answer has no explanation.
    """
    kept = {place: index for index, place in enumerate(found.inputs.kept())}
    answered = found.answered()
    chosen = []
    for place in shown:
        if place in kept and answered[kept[place]]:
            chosen.append(kept[place])
    if not chosen:
        return Reasons()
    if model.silo.features:
        assert isinstance(found.inputs, RowInputs)
        return _columns(model, found, found.inputs, chosen)
    return _pictures(model, found.inputs, chosen[:_PICTURES])


def _columns(
    model: TrainedModel, found: Predictions, inputs: RowInputs, chosen: Sequence[int]
) -> Reasons:
    # The model's own answers: a temperature does not change which class is the most probable
    answers = found.own[chosen].argmax(dim=1)
    features = model.silo.features
    parts, _ = column_contributions(model.network, inputs.inputs[chosen], features, answers)
    names = columns_of(features)
    adds = {}
    for index, row in zip(chosen, parts.tolist(), strict=True):
        adds[index] = dict(zip(names, row, strict=True))
    said = (
        f"What an input adds: {METHOD}, against the mean of the training rows, in one pass without "
        "dropout. The parts add up to the probability of the answer less that of the mean row."
    )
    return Reasons(adds=adds, limits=[said])


def _pictures(model: TrainedModel, inputs: Inputs, chosen: Sequence[int]) -> Reasons:
    made: dict[int, tuple[bytes, str]] = {}
    places = inputs.kept()
    try:
        for index in chosen:
            image = _image(inputs, places[index], index)
            cases = Split(image[None], torch.zeros(1, dtype=torch.int64))
            explained = explain_case(model.lab, model.network, cases, 0, "")
            if isinstance(explained, ImageExplanation):
                made[index] = _png(explained), explained.saliency.place
    except SettingError as error:
        return Reasons(limits=[f"What spoke for an answer is not shown: {error}."])
    said = f"Maps over images, of up to {_PICTURES} cases, show what mattered to the answer."
    return Reasons(pictures=made, limits=[said])


def _image(inputs: Inputs, place: int, index: int) -> torch.Tensor:
    # Images of files are decoded again, because keeping all of them could fill the memory
    if isinstance(inputs, FileInputs):
        return torch.from_numpy(np.array(inputs.reader(inputs.paths[place])))
    assert isinstance(inputs, RowInputs)
    return inputs.inputs[index]


def _png(explained: ImageExplanation) -> bytes:
    figure = new_figure(5.0, 2.6)
    explained.draw(*figure.subplots(1, 2))
    buffer = io.BytesIO()
    options: dict[str, Any] = {"format": "png", "dpi": 110, "metadata": {"Software": None}}
    figure.savefig(buffer, **options)
    return buffer.getvalue()
