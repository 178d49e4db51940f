"""Explain a routed model's prediction for one patient, shown only at the hospital."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsilo.core.drawing.palette import BLUE, ORANGE
from fedsilo.core.drawing.panels import annotated_heat_map, literal
from fedsilo.core.one_line import format_count
from fedsilo.models.methods.picsr import PICSRNetwork, feature_contributions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LISTED, DRAWN = 3, 30  # the number of features in a line of text, and in a picture


@dataclass(frozen=True)
class PatientExplanation:
    """PICSR's routing of one patient. All lists except ``features`` are in the experts' order."""

    title: str  # names the patient, the true class if known, and the prediction
    experts: list[str]  # the name of the site that trained each expert
    weights: list[float]  # the router's weight for each expert; they sum to 1
    answers: list[float]  # each expert's probability of the last class
    distances: list[float]  # the sample's distance to each prototype, in the router's embedding
    # The terms of each similarity and the bias; softmax of their sums gives the weights
    scores: list[list[float]]
    features: list[str]  # the names of the features
    contributions: list[list[float]]  # the contribution of each feature to each distance

    def document(self) -> dict[str, Any]:
        """Return the explanation as a JSON object with the fields of this class."""
        return vars(self)

    def lines(self) -> list[str]:
        """Format the explanation as text for a clinician.

        The first line is the title. The second line says that the prediction is a weighted mean
        over the hospitals' models. Then each hospital has a line, in descending order of the weight
        of its model. This line gives the weight, the model's probability of the outcome (the last
        class), and three features. In these features, the patient differs most from the hospital's
        mean patient.
        """
        width = max(map(len, self.experts))
        hospitals = format_count(len(self.experts), "hospital")
        lines = [self.title, f"It is the weighted mean over the models of {hospitals}:"]
        order = sorted(range(len(self.experts)), key=lambda index: -self.weights[index])
        for index in order:
            by_distance = sorted(self._features_of(index), key=lambda pair: -abs(pair[0]))
            apart = ", ".join(name for _, name in by_distance[:LISTED])
            lines.append(
                f"  {self.experts[index]:{width}}  weight {_percent(self.weights[index])}  "
                f"probability {_percent(self.answers[index])}  differs most from its patients in "
                f"{apart}"
            )
        return lines

    def _features_of(self, expert: int) -> list[tuple[float, str]]:
        """Return (contribution, name) of each feature for the distance to one expert."""
        return list(zip(self.contributions[expert], self.features, strict=True))

    def figure(self) -> Figure:
        """Draw three panels that show how the mixture weights the models of the sites (experts).

        The left panel shows the weight of each expert, and the probability that the expert gives
        the last class. The middle panel shows the terms of each expert's score: one per distance,
        and a bias. The right panel shows the contribution of each feature to each distance, for at
        most 30 features.
        """
        from matplotlib.figure import Figure

        rows = min(len(self.features), DRAWN)
        size = (8 + 1.5 * len(self.experts), 2.2 + 0.28 * rows)
        figure = Figure(figsize=size, layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.2))
        self._draw_answers(left)
        places = [f"from {site}" for site in self.experts]
        places.append("bias")
        # (experts, terms) -> (terms, experts): the heat map has a row per term
        columns = list(zip(*self.scores, strict=True))
        title = "what each distance adds to the score"
        annotated_heat_map(middle, columns, places, self.experts, title, signed=True)
        self._draw_contributions(right)
        figure.suptitle(literal(self.title), fontsize="medium")
        return figure

    def _draw_answers(self, axes: Axes) -> None:
        places = np.arange(len(self.experts))
        axes.bar(places - 0.2, self.weights, 0.4, label="router's weight", color=BLUE)
        axes.bar(places + 0.2, self.answers, 0.4, label="expert's probability", color=ORANGE)
        axes.set_xticks(places, self.experts, rotation=40, ha="right")
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("expert of")
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2)

    def _draw_contributions(self, axes: Axes) -> None:
        """Draw a heat map of each feature's contribution to the distance to each expert.

        At most 30 features are drawn, in the order of the table. A feature is chosen if its largest
        absolute contribution to any distance is among the highest. Of equal features, the first
        ones are chosen.
        """
        columns = list(zip(*self.contributions, strict=True))
        # (experts, features) -> (features,): a feature matters if it separates from any expert
        largest = np.abs(self.contributions).max(axis=0)
        # A stable sort draws the first ones of equal features
        chosen = sorted(np.argsort(-largest, kind="stable")[:DRAWN])
        values, names = [], []
        for index in chosen:
            values.append(columns[index])
            names.append(self.features[index])
        labels = []
        for site, distance in zip(self.experts, self.distances, strict=True):
            labels.append(f"{site}\n(sum {distance:.2f})")
        title = "what each feature adds to the distance"
        annotated_heat_map(axes, values, names, labels, title, signed=True)


def _percent(share: float) -> str:
    """Format a share from 0 to 1 as a percentage with one decimal."""
    return f"{100 * share:5.1f} %"


def explain_routing(
    network: PICSRNetwork,
    sample: Tensor,
    title: str,
    features: list[str],
    outcome: str = "the last class",
) -> PatientExplanation:
    """Explain a mixture's prediction for one patient: the weight and the answer of each expert.

    The method PICSR mixes the networks of all sites, called experts. Its router derives an expert's
    weight from the patient's distance to the mean training sample of each site. The explanation
    shows these distances, the contribution of each feature to them, and the amount that each
    distance adds to an expert's score.

    Args:
        network: the mixture of experts; it is put in eval mode.
        sample: (*input_shape), as the network takes it but without batch dimension, on its device.
        title: a name for the patient. The explanation adds the mixture's probability of the last
            class.
        features: the names of the features; if empty, features are numbered from 0.
        outcome: the name of the last class, for the title.
    """
    network.eval()
    with torch.no_grad():
        weights = network.log_weights(sample[None])[0].exp()
        answers = []
        for expert in network.experts:
            logits = expert(sample[None])[0]
            answers.append(torch.softmax(logits, dim=-1)[-1].item())
        answer = network(sample[None])[0].exp()[-1].item()
        distances = network.router.distances(sample[None], network.prototypes)[0]
        scores = network.router.scores(distances)
    # (experts, *input_shape) -> (experts, features); gradients are needed, so outside of no_grad
    parts = feature_contributions(network.router, sample, network.prototypes).flatten(1)
    return PatientExplanation(
        f"{title}; the model's probability of {outcome} is {_percent(answer).strip()}",
        network.sites,
        weights.tolist(),
        answers,
        distances.tolist(),
        scores.tolist(),
        features or [str(index) for index in range(parts.shape[1])],
        parts.tolist(),
    )
